"""The fleet of worker processes on this machine: starts, watches, recycles and cleans up workers.

It supervises workers directly, without a process pool: a dead worker is noticed at once, and its attempts are
handed back without blame. `scaling.py` decides the number of workers, `placement.py` which worker hosts an
attempt; `rollout/worker.py` is the worker itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from ...core.config import RunConfig
from ...core.failures import make_interrupt_failure, make_loss_failure
from ...core.records import Attempt, AttemptFailure, Verdict
from ...governor.memory_control import NEW_WORKER
from ...governor.resource_reading import FleetCensus
from ...rollout.periodic_task import PeriodicTask
from ...rollout.worker_protocol import (
    AttemptDone,
    AttemptJob,
    CancelAttempt,
    EventNoted,
    ExtendLease,
    LineLogged,
    ScoreMembers,
    SteerWorker,
    TrimMemory,
    WorkerBroken,
    WorkerHeartbeat,
    WorkerReady,
    WorkerSetup,
    WorkerUnfit,
)
from .interface import Emit, FleetCondition, ToAttempt, WorkerGone
from .placement import AttemptPlacement
from .process import WorkerDeath, WorkerProcess
from .roster import WorkerRoster
from .running_clock import RunningClock
from .scaling import StartBackoff, WorkerScaling
from .worker_remains import WorkerRemains

PATROL_SECONDS = 1.0
LONGEST_SILENCE = 9  # times the silence allowed to an idle worker: the bound for a busy one
MOST_START_FAILURES = 3  # consecutive failures of workers to start that stop the run


class LocalFleet:
    """Runs `config.workers` workers, or as many as a server needs; one more for each lone attempt."""

    def __init__(self, welcome: WorkerSetup, emit: Emit, env: Mapping[str, str]) -> None:
        self._welcome = welcome
        self._env = env
        self._config = welcome.config
        self._emit = emit
        self._roster = WorkerRoster(welcome.config)
        self._scaling = _make_scaling(welcome.config, self._roster.share)
        self._start_backoff = StartBackoff(patient=welcome.config.serving is not None)
        self._placement = AttemptPlacement(self._roster, self._start_backoff, self)
        self._running = RunningClock()  # measures silence, lateness and overdue starts
        self._numbers = 0
        self._lost = self._recycled = 0
        self.memory_version = 0
        self._steered: SteerWorker | None = None  # the last one: for workers that start later
        self._closing = False
        self._remains = WorkerRemains(welcome, self._note)
        self._stack = AsyncExitStack()
        self._clock = asyncio.get_running_loop().time

    async def __aenter__(self) -> LocalFleet:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        patrol = PeriodicTask("patrol", PATROL_SECONDS, self._patrol)
        self._patrol_task = self._group.create_task(patrol.perform(self._note))
        self._reconcile_workers()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._patrol_task.cancel()
        for worker in self._roster:
            if worker.attempts or not worker.ready:
                worker.kill()
            else:
                worker.leave()
        await self._stack.aclose()
        self._remains.close()

    # Called by the scheduler.

    async def start(self, job: AttemptJob) -> None:
        found = await self._placement.find(job)
        if isinstance(found, AttemptFailure):
            self._finish(job.attempt, found)
            return
        found.host(job)
        if job.attempt.group is not None:  # other members of its group can join it
            # Not awaited: messages of the attempt must be handled only after this call returns.
            self._group.create_task(self._placement.wake())

    def interrupt(self, attempt: int, failure: AttemptFailure) -> None:
        if self._placement.end(attempt, failure):
            self._group.create_task(self._placement.wake())
        elif worker := self._roster.host_of(attempt):
            worker.send(CancelAttempt(attempt=attempt, failure=failure))

    def give_up(self, attempt: int) -> str:
        worker = self._roster.host_of(attempt)
        if worker is None:
            return "(no worker hosts it)"
        worker.forget(attempt)
        self.retire(worker, f"attempt {attempt} hangs in it")
        return worker.locate_attempt(attempt)

    def take_census(self) -> FleetCensus:
        return self._roster.take_census()

    # Called by the governor.

    def allow_memory(self, attempt: int, memory: int) -> None:
        if worker := self._roster.host_of(attempt):
            worker.send(ExtendLease(attempt=attempt, memory=memory))

    def trim(self) -> str:
        quiet = [w for w in self._roster if w.ready and not w.attempts and not w.gone]
        for worker in quiet:
            worker.send(TrimMemory())
        return f"{len(quiet)} quiet workers give memory back" if quiet else ""

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        workers = [w for w in self._roster if w.ready and not w.gone]
        room = max(0, room - self._start_cost * len(self._roster.starting))  # they have not grown yet
        for worker in workers:
            worker.permit_growth(leases, room // len(workers))

    def recycle(self, least: int, *, at_once: bool) -> str:
        """Choose by the memory left by ended attempts: living attempts would use theirs on any worker."""
        grown = [w for w in self._roster if w.ready and not w.draining and w.residual_memory >= least]
        going = any(w.draining for w in self._roster) or (at_once and self._roster.outgoing)
        if not grown or going:
            return ""
        worker = max(grown, key=lambda w: w.residual_memory)
        left = f"{worker.residual_memory >> 20} MiB"
        reason = f"holds {left} of ended attempts, and memory is short"
        if at_once:
            self._recycle(worker, reason)
        else:
            self.retire(worker, reason, later=True)
        return f"worker {worker.number} is replaced, which holds {left} of ended attempts"

    # Called by a server.

    def send(self, attempt: int, message: ToAttempt) -> bool:
        worker = self._roster.host_of(attempt)
        if worker is not None:
            worker.send(message)
        return worker is not None

    def score_group(self, group: int, together: bool) -> None:
        for worker in self._roster:
            if group in worker.groups:
                worker.send(ScoreMembers(group=group, together=together))

    def steer(self, message: SteerWorker) -> None:
        self._steered = message
        for worker in self._roster:
            if worker.ready:
                worker.send(message)

    def adjust_workers(self, running: int, waiting: int, room: int) -> None:
        if self._config.serving is None:
            return
        cost = self._start_cost
        room += self._placement.leased  # the leases of attempts that wait for a worker
        room -= cost * len(self._roster.starting)  # they have not grown yet
        before = self._scaling.wanted
        if self._scaling.update(self._clock(), running, waiting, room, cost) != before:
            self._reconcile_workers()

    @property
    def _start_cost(self) -> int:
        """Bytes that a new worker takes until it is ready."""
        return max(NEW_WORKER, *(w.initial_rss for w in self._roster), 0)

    def condition(self) -> FleetCondition:
        return FleetCondition(
            ready=len(self._roster.taking),
            starting=len(self._roster.starting),
            draining=sum(1 for w in self._roster if w.draining),
            wanted=self._scaling.wanted,
            lost=self._lost,
            recycled=self._recycled,
            unfit=self._start_backoff.unfit,
        )

    # The number of workers.

    def _reconcile_workers(self) -> None:
        """Have as many workers as wanted: replace leaving workers, drain spare ones."""
        if self._closing:
            return
        wanted = self._scaling.wanted
        for worker in self._roster.spare(wanted):
            self._drain(worker, "fewer workers are needed")
            worker.replaced = True  # no other worker takes its place
        while len(self._roster.places) < wanted and self._may_spawn():
            self._spawn()
        if self._roster.ready_places >= wanted:
            for worker in self._roster.outgoing:
                self.retire(worker, worker.outgoing)

    def _may_spawn(self) -> bool:
        """While workers fail to start, try one at a time."""
        calm = not self._start_backoff.unfit or not self._roster.starting
        return calm and self._start_backoff.due(self._clock()) and not self._closing

    def spawn_solo(self) -> WorkerProcess | None:
        return self._spawn(solo=True)

    def _spawn(self, solo: bool = False) -> WorkerProcess | None:
        self._numbers += 1
        try:
            worker = WorkerProcess(self._numbers, self._welcome, self._env, self._running, solo=solo)
        except OSError as error:
            if not self._start_backoff.ever_ready:
                raise
            self._record_start_failure(f"cannot be started: {error}")
            return None
        self._roster.add(worker)
        self._group.create_task(self._listen(worker))
        return worker

    def _record_start_failure(self, why: str, hint: str = "") -> None:
        """Record that a worker could not start. If that is not temporary, end the run with the reason."""
        self._start_backoff.fail(self._clock(), why)
        if self._start_backoff.failed == 1:
            self._note("worker.unfit", why)
        if self._start_backoff.hopeless(MOST_START_FAILURES):
            self._closing = True
            self._emit(WorkerUnfit(message=f"workers die at start-up: {why}", hint=hint))

    # The lifecycle of a worker.

    async def _listen(self, worker: WorkerProcess) -> None:
        """Handle a worker's messages until it is dead, then clean up after it."""
        async for message in worker.messages():
            match message:
                case WorkerReady():
                    self._on_ready(worker)
                    await self._placement.wake()
                case WorkerHeartbeat():
                    self.memory_version += 1
                    worker.record_beat(message)
                case AttemptDone():
                    self._on_done(worker, message)
                    await self._placement.wake()
                case WorkerUnfit():
                    self._on_unfit(worker, message)
                case EventNoted() | LineLogged() | WorkerBroken():
                    self._emit(message)
                case _:
                    if message.attempt in worker.attempts:  # else it was given up, and has its verdict
                        self._emit(message)
        death = await worker.wait_for_death()
        self._roster.remove(worker)
        await self._handle_death(worker, death)

    def _on_ready(self, worker: WorkerProcess) -> None:
        worker.ready = True
        self._start_backoff.succeed()
        if self._steered is not None:
            worker.send(self._steered)
        self._reconcile_workers()

    def _on_done(self, worker: WorkerProcess, message: AttemptDone) -> None:
        attempt = worker.forget(message.verdict.attempt)
        worker.hosted += 1
        if attempt is not None:
            self._emit(message)
        if message.tainted:
            self.retire(worker, f"attempt {message.verdict.attempt} left something running in it")
        elif worker.solo and not (worker.attempts or worker.awaited):
            self.retire(worker, "its suspect attempt is done")
        elif worker.draining and not worker.attempts:
            worker.leave()

    def _on_unfit(self, worker: WorkerProcess, message: WorkerUnfit) -> None:
        """Handle a worker that reports why it cannot start: no other could either, unless one did before."""
        if self._start_backoff.ever_ready and self._config.serving is not None:
            worker.kill(f"{message.message}; {message.hint}" if message.hint else message.message)
            return
        self._closing = True
        self._emit(message)

    async def _handle_death(self, worker: WorkerProcess, death: WorkerDeath) -> None:
        """Hand back attempts without a verdict, and start another worker."""
        if self._closing:
            return
        if not (worker.ready or worker.draining):
            self._record_start_failure(death.reason, f"see `{worker.log}`")
        elif worker.attempts or not worker.draining:
            self._lost += 1
            self._note("worker.lost", f"worker {worker.number}: {death.reason}")
        if worker.attempts:
            self._group.create_task(self._remains.sweep(list(worker.attempts)))
        for verdict in await self._remains.read_verdicts(worker.number, frozenset(worker.attempts)):
            worker.forget(verdict.attempt)
            self._emit(AttemptDone(verdict=verdict))
        for attempt in list(worker.attempts.values()):
            self._finish(attempt, make_loss_failure(attempt, death.reason, own=death.own))
        self._emit(WorkerGone(worker=worker.number))
        self._reconcile_workers()
        await self._placement.wake()

    def _recycle(self, worker: WorkerProcess, reason: str) -> None:
        """Start another worker first; this one continues as before until that one is ready."""
        worker.outgoing = reason
        self._reconcile_workers()

    def retire(self, worker: WorkerProcess, reason: str, later: bool = False) -> None:
        """Give the worker nothing new; replace it now, or `later`, when it is gone."""
        if not (worker.draining or worker.solo):
            self._recycled += 1
        self._drain(worker, reason, later=later and not worker.outgoing)
        self._reconcile_workers()

    def _drain(self, worker: WorkerProcess, reason: str, later: bool = False) -> None:
        """Give the worker nothing new; it exits when it is empty."""
        if not worker.draining:
            worker.draining = True
            worker.replaced = not later
            self._note("worker.retired", f"worker {worker.number}: {reason}")
        if not worker.attempts:
            worker.leave()
            return
        draining = [w for w in self._roster if w.draining and not (w.solo or w.emptied) and w.attempts]
        if len(draining) > max(1, self._config.workers):
            self._interrupt_hosted(draining[0])

    def _interrupt_hosted(self, worker: WorkerProcess) -> None:
        """Interrupt the worker's attempts because too many workers drain; they continue on other workers."""
        worker.emptied = True
        for attempt in worker.attempts:
            failure = make_interrupt_failure("its worker is being replaced")
            worker.send(CancelAttempt(attempt=attempt, failure=failure))

    async def _patrol(self) -> None:
        """Each second: find workers that hang, fail to start, use too much memory, or hosted enough."""
        self._running.tick()
        for worker in self._roster:
            if worker.silent(self._config.silence, self._config.silence * LONGEST_SILENCE):
                reason = f"hung: no sign of life for {worker.silence:.0f} s {worker.describe_load()}"
                worker.kill(reason, hung=True)
            elif not worker.ready and self._overdue(worker):
                worker.kill(f"not ready after {worker.age:.0f} s")
            elif worker.draining or worker.outgoing or worker.solo or not worker.ready:
                continue
            elif worker.rss > self._config.worker_memory and worker.hosted:  # else it would never host any
                self._recycle(worker, f"uses {worker.rss >> 20} MiB")
            elif worker.hosted >= self._config.recycle_after:
                self._recycle(worker, f"hosted {worker.hosted} attempts")
        self._reconcile_workers()
        if self._start_backoff.unfit:
            await self._placement.wake()

    def _overdue(self, worker: WorkerProcess) -> bool:
        return self._config.serving is not None and worker.age > self._config.serving.starting

    def _note(self, kind: str, message: str) -> None:
        self._emit(EventNoted(kind=kind, message=message))

    def _finish(self, attempt: Attempt, failure: AttemptFailure) -> None:
        self._emit(
            AttemptDone(verdict=Verdict(attempt=attempt.id, token=self._welcome.token, failure=failure))
        )


def _make_scaling(config: RunConfig, share: int) -> WorkerScaling:
    """Return the scaling: a fixed number of workers for a run, by demand for a server."""
    if config.serving is None:
        return WorkerScaling(config.workers, config.workers, share, 0.0)
    least = max(1, min(config.serving.least_workers, config.workers))
    return WorkerScaling(least, config.workers, share, config.serving.quiet)
