"""The fleet of worker processes on this machine: starts, watches, recycles and cleans up workers.

`core/workers.py` decides; this module reports events to it and carries its commands out on processes. It
supervises workers directly, without a process pool: a dead worker is noticed at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import NamedTuple

from ...core.config import RunConfig
from ...core.records import AttemptFailure, Verdict
from ...core.worker_events import (
    AnyFleetCommand,
    AnyFleetEvent,
    AttemptGivenUp,
    AttemptOffered,
    AttemptReported,
    AttemptStopped,
    AttemptWithdrawn,
    DemandChanged,
    DismissWorker,
    FleetClosed,
    FleetOpened,
    HostAttempt,
    KillWorker,
    NoteEvent,
    RecoverWorker,
    ReplacementRequested,
    ReturnAttempt,
    StartFailed,
    StartWorker,
    StopAttempt,
    StopRun,
    SuccessorStart,
    WorkerDied,
    WorkerDisconnected,
    WorkerOpened,
    WorkerRecovered,
    WorkerRefused,
    WorkersMeasured,
)
from ...core.workers import WorkerPlanner
from ...governor.memory_control import NEW_WORKER
from ...governor.resource_reading import FleetCensus
from ...rollout.periodic_task import PeriodicTask
from ...rollout.process_health import RunningClock
from ...rollout.worker_protocol import (
    AttemptDone,
    AttemptJob,
    CancelAttempt,
    ChangeWorker,
    EndpointsUsed,
    EventNoted,
    ExtendLease,
    LineLogged,
    ScoreMembers,
    StandingMessage,
    TrimMemory,
    WorkerBroken,
    WorkerHeartbeat,
    WorkerReady,
    WorkerSetup,
    WorkerUnfit,
)
from .endpoint_tally import EndpointTally
from .interface import Emit, FleetCondition, ToAttempt, WorkerGone, sum_usage
from .process import WorkerProcess, WorkerRemains

PATROL_SECONDS = 1.0


class StartRequest(NamedTuple):
    """A call of `start` that waits for a worker."""

    job: AttemptJob
    done: asyncio.Future[AttemptFailure | None]  # the failure: no worker will host it


class LocalFleet:
    """Runs as many workers as the attempts need, at most `config.workers`; one more for each lone attempt."""

    def __init__(self, welcome: WorkerSetup, emit: Emit, env: Mapping[str, str]) -> None:
        self._welcome = welcome
        self._env = env
        self._emit = emit
        self._plan = WorkerPlanner(welcome.config)
        self._processes: dict[int, WorkerProcess] = {}  # bound: the planner's workers
        self._requests: dict[int, StartRequest] = {}  # by attempt; bound: the run's concurrency
        self._events: deque[AnyFleetEvent] = deque()  # bound: what one command causes
        self._carrying_out = False
        self._running = RunningClock()  # measures silence, lateness and overdue starts
        self.memory_version = 0
        self._endpoints = EndpointTally()
        self._standing: dict[type, StandingMessage] = {}  # the last of each kind, for workers to come
        self._remains = WorkerRemains(welcome, self._note)
        self._stack = AsyncExitStack()
        self._clock = asyncio.get_running_loop().time

    async def __aenter__(self) -> LocalFleet:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        patrol = PeriodicTask("patrol", PATROL_SECONDS, self._patrol)
        self._patrol_task = self._group.create_task(patrol.perform(self._note))
        self._handle(FleetOpened())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patrol_task.cancel()
        self._handle(FleetClosed())
        await self._stack.aclose()
        self._remains.close()

    # Called by the scheduler.

    async def start(self, job: AttemptJob) -> None:
        attempt = job.attempt.id
        request = StartRequest(job, asyncio.get_running_loop().create_future())
        self._requests[attempt] = request
        try:
            self._handle(AttemptOffered(attempt=job.attempt, lease=job.lease))
            # No message of the attempt can be handled before this call returns: the future is done when the
            # job is sent, and the worker's answer comes later.
            failure = await request.done
        except asyncio.CancelledError:
            self._handle(AttemptWithdrawn(attempt=attempt))
            raise
        finally:
            del self._requests[attempt]
        if failure is not None:
            self._finish(attempt, failure)

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        self._handle(AttemptStopped(attempt=attempt, failure=failure))

    def give_up(self, attempt: int) -> str:
        worker = self._find_host(attempt)
        if worker is not None:
            worker.forget(attempt)
        self._handle(AttemptGivenUp(attempt=attempt))
        return "(no worker hosts it)" if worker is None else worker.locate_attempt(attempt)

    def take_census(self) -> FleetCensus:
        workers = self._processes.values()
        uses = {attempt: use for worker in workers for attempt, use in worker.uses().items()}
        living = [status for worker in workers for status in worker.living]
        return FleetCensus(
            workers=len(workers),
            draining=len(self._plan.workers.draining),
            pids=tuple(worker.pid for worker in workers),
            lag=max((worker.lag for worker in workers), default=0.0),
            phases=dict(Counter(str(status.phase) for status in living)),
            usage=sum_usage(status for status in living if status.attempt in uses),
            uses=uses,
            endpoints=self._endpoints.sum_up(),
        )

    # Called by the governor.

    def allow_memory(self, attempt: int, memory: int) -> None:
        if worker := self._find_host(attempt):
            worker.send(ExtendLease(attempt=attempt, memory=memory))

    def trim(self) -> str:
        quiet = [w.number for w in self._plan.workers.opened if not w.attempts]
        for number in quiet:
            self._processes[number].send(TrimMemory())
        return f"{len(quiet)} quiet workers give memory back" if quiet else ""

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        workers = self._plan.workers.opened
        room = max(0, room - self._start_cost * len(self._plan.workers.starting))  # they have not grown yet
        for worker in workers:
            self._processes[worker.number].permit_growth(leases, room // len(workers))

    def recycle(self, least: int, *, at_once: bool) -> str:
        successor = SuccessorStart.FIRST if at_once else SuccessorStart.AFTER
        residual = {number: worker.residual_memory for number, worker in self._processes.items()}
        worker = self._plan.workers.find_grown(residual, least, successor)
        if worker is None:
            return ""
        left = f"{residual[worker.number] >> 20} MiB"
        reason = f"holds {left} of ended attempts, and memory is short"
        self._handle(ReplacementRequested(worker=worker.number, reason=reason, successor=successor))
        return f"worker {worker.number} is replaced, which holds {left} of ended attempts"

    # Called by a server.

    def send(self, attempt: int, message: ToAttempt) -> bool:
        worker = self._find_host(attempt)
        if worker is not None:
            worker.send(message)
        return worker is not None

    def score_group(self, group: int, together: bool) -> None:
        for worker in self._plan.workers.living:
            if group in worker.groups:
                self._processes[worker.number].send(ScoreMembers(group=group, together=together))

    def announce(self, message: StandingMessage) -> None:
        self._standing[type(message)] = message
        for worker in self._plan.workers.opened:
            self._processes[worker.number].send(message)

    def change(self, config: RunConfig) -> None:
        self._plan.change(config)
        self.announce(ChangeWorker(config=config))

    def adjust_workers(self, running: int, waiting: int, room: int) -> None:
        if self._welcome.config.serving is not None:
            cost = self._start_cost
            self._handle(DemandChanged(running=running, waiting=waiting, room=room, start_cost=cost))

    def condition(self) -> FleetCondition:
        workers = self._plan.workers
        return FleetCondition(
            ready=len(workers.taking),
            starting=len(workers.starting),
            draining=len(workers.draining),
            wanted=self._plan.wanted,
            lost=self._plan.lost,
            recycled=self._plan.recycled,
            unfit=self._plan.unfit,
        )

    @property
    def _start_cost(self) -> int:
        """Bytes that a new worker takes until it is ready."""
        return max(NEW_WORKER, *(worker.initial_rss for worker in self._processes.values()), 0)

    def _find_host(self, attempt: int) -> WorkerProcess | None:
        entry = self._plan.workers.find_host(attempt)
        return None if entry is None else self._processes.get(entry.number)

    # Carrying out commands.

    def _handle(self, event: AnyFleetEvent) -> None:
        """Pass the event to the planner. An event that a command causes waits for the other commands."""
        self._events.append(event)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._events:
                for command in self._plan.handle(self._events.popleft(), self._clock()):
                    self._carry_out(command)
        finally:
            self._carrying_out = False

    def _carry_out(self, command: AnyFleetCommand) -> None:
        match command:
            case StartWorker(worker=number):
                self._start_worker(number)
            case HostAttempt(worker=number, attempt=attempt):
                request = self._requests[attempt]
                self._processes[number].host(request.job)
                if not request.done.done():  # else its caller is being cancelled: the run ends
                    request.done.set_result(None)
            case StopAttempt(worker=number, attempt=attempt, failure=failure):
                self._processes[number].send(CancelAttempt(attempt=attempt, failure=failure))
            case ReturnAttempt(attempt=attempt, failure=failure):
                self._return_attempt(attempt, failure)
            case DismissWorker(worker=number) if number in self._processes:  # else it could not be started
                self._processes[number].leave()
            case KillWorker(worker=number, reason=reason, hung=hung) if number in self._processes:
                self._processes[number].kill(reason, hung=hung)
            case RecoverWorker(worker=number, attempts=attempts):
                self._group.create_task(self._recover(number, attempts))
            case NoteEvent(kind=kind, message=message):
                self._note(kind, message)
            case StopRun(message=message, hint=hint, exit_status=status):
                self._emit(WorkerUnfit(message=message, hint=hint, exit_status=status))

    def _start_worker(self, number: int) -> None:
        try:
            worker = WorkerProcess(number, self._welcome, self._env, self._running)
        except OSError as error:
            if not self._plan.ever_ready:
                raise
            self._handle(StartFailed(worker=number, reason=str(error)))
            return
        self._processes[number] = worker
        self._group.create_task(self._listen(worker))

    def _return_attempt(self, attempt: int, failure: AttemptFailure) -> None:
        if attempt in self._requests:
            if not (done := self._requests[attempt].done).done():
                done.set_result(failure)
        else:
            self._finish(attempt, failure)

    async def _recover(self, worker: int, attempts: tuple[int, ...]) -> None:
        """Pass on the verdicts that a dead worker could not report, and clean up after its attempts."""
        if attempts:
            self._group.create_task(self._remains.sweep(list(attempts)))
        verdicts = await self._remains.read_verdicts(worker, attempts)
        open_attempts = self._plan.workers[worker].attempts  # an attempt may have been given up meanwhile
        settled = [verdict for verdict in verdicts if verdict.attempt in open_attempts]
        for verdict in settled:
            self._emit(AttemptDone(verdict=verdict))
        self._handle(WorkerRecovered(worker=worker, settled=tuple(verdict.attempt for verdict in settled)))
        self._emit(WorkerGone(worker=worker))

    # Watching workers.

    async def _listen(self, worker: WorkerProcess) -> None:
        """Handle a worker's messages until it is dead."""
        number = worker.number
        attempts = self._plan.workers[number].attempts
        async for message in worker.messages():
            match message:
                case WorkerReady():
                    for standing in self._standing.values():
                        worker.send(standing)
                    self._handle(WorkerOpened(worker=number))
                case WorkerHeartbeat():
                    self.memory_version += 1
                    worker.record_beat(message)
                case EndpointsUsed(uses=uses):
                    self._endpoints.add(number, uses)
                case AttemptDone(verdict=verdict, tainted=tainted):
                    worker.forget(verdict.attempt)
                    if verdict.attempt in attempts:  # else it was given up, and has its verdict
                        self._emit(message)
                    self._handle(AttemptReported(worker=number, attempt=verdict.attempt, tainted=tainted))
                case WorkerUnfit(message=reason, hint=hint, exit_status=status):
                    self._handle(WorkerRefused(worker=number, message=reason, hint=hint, exit_status=status))
                case EventNoted() | LineLogged() | WorkerBroken():
                    self._emit(message)
                case _:
                    if message.attempt in attempts:
                        self._emit(message)
        self._handle(WorkerDisconnected(worker=number))
        death = await worker.wait_for_death()
        del self._processes[number]
        self._endpoints.forget(number)
        hint = f"see `{worker.log}`"
        self._handle(WorkerDied(worker=number, reason=death.reason, own=death.own, hint=hint))

    async def _patrol(self) -> None:
        """Each second: measure all workers."""
        self._running.tick()
        measures = tuple(worker.measure() for worker in self._processes.values())
        self._handle(WorkersMeasured(measures=measures))

    def _note(self, kind: str, message: str) -> None:
        self._emit(EventNoted(kind=kind, message=message))

    def _finish(self, attempt: int, failure: AttemptFailure) -> None:
        verdict = Verdict(attempt=attempt, token=self._welcome.token, failure=failure)
        self._emit(AttemptDone(verdict=verdict))
