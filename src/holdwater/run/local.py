"""The fleet of worker processes on this machine: started by exec, watched, recycled, buried.

Supervision is ours: a dead worker is seen at once, its attempts are handed back without blame, and no pool
stands between. How many there are is decided in `scaling.py`, who hosts an attempt in `placement.py`; what a
worker does inside is in `rollout/worker.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType

from ..core.config import RunConfig
from ..core.failures import interrupted, worker_lost
from ..core.records import Attempt, Failure, Verdict
from ..rollout.duty import Duty
from ..rollout.wire import (
    Allow,
    Beat,
    Broken,
    Cancel,
    Done,
    Job,
    Noted,
    Ready,
    Said,
    Score,
    Steered,
    Trim,
    Unfit,
    Welcome,
)
from .fleet import Census, Condition, Emit, Gone, ToAttempt
from .governor import NEW_WORKER
from .placement import Placement
from .process import WorkerDeath, WorkerProcess
from .remains import WorkerRemains
from .roster import Roster
from .running_clock import RunningClock
from .scaling import Births, Scaling

PATROL_SECONDS = 1.0
LONGEST_SILENCE = 9  # times the silence of an idle worker: without a beat, however busy
STILLBORN = 3  # workers that cannot start, one after another, stop the run


class LocalFleet:
    """`config.workers` processes, or as many as a server needs; one more for each that must be alone."""

    def __init__(self, welcome: Welcome, emit: Emit, env: Mapping[str, str]) -> None:
        self._welcome = welcome
        self._env = env
        self._config = welcome.config
        self._emit = emit
        self._roster = Roster(welcome.config)
        self._scaling = _scaling(welcome.config, self._roster.share)
        self._births = Births(patient=welcome.config.serving is not None)
        self._placement = Placement(self._roster, self._births, self)
        self._running = RunningClock()  # what is silent, late or overdue is measured by it
        self._numbers = 0
        self._lost = self._recycled = 0
        self.news = 0
        self._steered: Steered | None = None  # the last: for workers that start later
        self._closing = False
        self._remains = WorkerRemains(welcome, self._note)
        self._stack = AsyncExitStack()
        self._clock = asyncio.get_running_loop().time

    async def __aenter__(self) -> LocalFleet:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        patrol = Duty("patrol", PATROL_SECONDS, self._patrol)
        self._patrol_task = self._group.create_task(patrol.perform(self._note))
        self._staff()
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

    # What the scheduler asks for.

    async def start(self, job: Job) -> None:
        found = await self._placement.find(job)
        if isinstance(found, Failure):
            self._finish(job.attempt, found)
            return
        found.host(job)
        if job.attempt.group is not None:  # the others of its group can join it
            self._group.create_task(self._placement.wake())  # not awaited: what it says is heard only after

    def interrupt(self, attempt: int, failure: Failure) -> None:
        if self._placement.end(attempt, failure):
            self._group.create_task(self._placement.wake())
        elif worker := self._roster.host_of(attempt):
            worker.send(Cancel(attempt=attempt, failure=failure))

    def give_up(self, attempt: int) -> str:
        worker = self._roster.host_of(attempt)
        if worker is None:
            return "no worker has it"
        worker.forget(attempt)
        self.retire(worker, f"attempt {attempt} hangs in it")
        return worker.whereabouts(attempt)

    def census(self) -> Census:
        return self._roster.census()

    # What the governor does.

    def allow(self, attempt: int, memory: int) -> None:
        if worker := self._roster.host_of(attempt):
            worker.send(Allow(attempt=attempt, memory=memory))

    def trim(self) -> str:
        quiet = [w for w in self._roster if w.ready and not w.attempts and not w.gone]
        for worker in quiet:
            worker.send(Trim())
        return f"{len(quiet)} quiet workers give memory back" if quiet else ""

    def permit(self, leases: Mapping[int, int], room: int) -> None:
        workers = [w for w in self._roster if w.ready and not w.gone]
        for worker in workers:
            worker.permit(leases, room // len(workers))

    def recycle(self, least: int, *, at_once: bool) -> str:
        """By what is left of ended attempts: what living ones use, they would use elsewhere too."""
        grown = [w for w in self._roster if w.ready and not w.draining and w.left >= least]
        going = any(w.draining for w in self._roster) or (at_once and self._roster.outgoing)
        if not grown or going:
            return ""
        worker = max(grown, key=lambda w: w.left)
        left = f"{worker.left >> 20} MiB"
        reason = f"holds {left} of ended attempts, and memory is short"
        if at_once:
            self._recycle(worker, reason)
        else:
            self.retire(worker, reason, later=True)
        return f"worker {worker.number} is replaced, which holds {left} of ended attempts"

    # What a server asks for.

    def send(self, attempt: int, message: ToAttempt) -> bool:
        worker = self._roster.host_of(attempt)
        if worker is not None:
            worker.send(message)
        return worker is not None

    def score(self, group: int, together: bool) -> None:
        for worker in self._roster:
            if group in worker.groups:
                worker.send(Score(group=group, together=together))

    def steer(self, message: Steered) -> None:
        self._steered = message
        for worker in self._roster:
            if worker.ready:
                worker.send(message)

    def demand(self, running: int, waiting: int, room: int) -> None:
        if self._config.serving is None:
            return
        cost = max(NEW_WORKER, *(w.first for w in self._roster), 0)
        room += self._placement.leased  # else nobody could start: it is leased to those who wait for a worker
        room -= cost * len(self._roster.starting)  # they have not grown yet
        before = self._scaling.wanted
        if self._scaling.look(self._clock(), running, waiting, room, cost) != before:
            self._staff()

    def condition(self) -> Condition:
        return Condition(
            ready=len(self._roster.taking),
            starting=len(self._roster.starting),
            draining=sum(1 for w in self._roster if w.draining),
            wanted=self._scaling.wanted,
            lost=self._lost,
            recycled=self._recycled,
            unfit=self._births.unfit,
        )

    # How many there are.

    def _staff(self) -> None:
        """As many workers as are wanted: others take the places of those that go, and spare ones go."""
        if self._closing:
            return
        wanted = self._scaling.wanted
        for worker in self._roster.spare(wanted):
            self._drain(worker, "fewer workers are needed")
            worker.replaced = True  # by nobody
        while len(self._roster.places) < wanted and self._may_spawn():
            self._spawn()
        if self._roster.succeeded >= wanted:
            for worker in self._roster.outgoing:
                self.retire(worker, worker.outgoing)

    def _may_spawn(self) -> bool:
        """While none can be started, one is tried at a time."""
        calm = not self._births.unfit or not self._roster.starting
        return calm and self._births.due(self._clock()) and not self._closing

    def spawn_solo(self) -> WorkerProcess | None:
        return self._spawn(solo=True)

    def _spawn(self, solo: bool = False) -> WorkerProcess | None:
        self._numbers += 1
        try:
            worker = WorkerProcess(self._numbers, self._welcome, self._env, self._running, solo=solo)
        except OSError as error:
            if not self._births.any:
                raise
            self._unable(f"cannot be started: {error}")
            return None
        self._roster.add(worker)
        self._group.create_task(self._attend(worker))
        return worker

    def _unable(self, why: str, hint: str = "") -> None:
        """A worker could not be started. Where that is no passing trouble, the run ends with the reason."""
        self._births.fail(self._clock(), why)
        if self._births.failed == 1:
            self._note("worker.unfit", why)
        if self._births.hopeless(STILLBORN):
            self._closing = True
            self._emit(Unfit(message=f"workers die at start-up: {why}", hint=hint))

    # A worker's life.

    async def _attend(self, worker: WorkerProcess) -> None:
        """Listen to a worker until it is dead, then bury it."""
        async for message in worker.messages():
            match message:
                case Ready():
                    self._welcomed(worker)
                    await self._placement.wake()
                case Beat():
                    self.news += 1
                    worker.heard(message)
                case Done():
                    self._done(worker, message)
                    await self._placement.wake()
                case Unfit():
                    self._unfit(worker, message)
                case Noted() | Said() | Broken():
                    self._emit(message)
                case _:
                    if message.attempt in worker.attempts:  # else it was given up, and has its verdict
                        self._emit(message)
        death = await worker.buried()
        self._roster.remove(worker)
        await self._mourn(worker, death)

    def _welcomed(self, worker: WorkerProcess) -> None:
        worker.ready = True
        self._births.succeed()
        if self._steered is not None:
            worker.send(self._steered)
        self._staff()

    def _done(self, worker: WorkerProcess, message: Done) -> None:
        attempt = worker.forget(message.verdict.attempt)
        worker.hosted += 1
        if attempt is not None:
            self._emit(message)
        if message.tainted:
            self.retire(worker, f"attempt {message.verdict.attempt} left something running in it")
        elif worker.solo and not (worker.attempts or worker.awaited):
            self.retire(worker, "its suspect is done")
        elif worker.draining and not worker.attempts:
            worker.leave()

    def _unfit(self, worker: WorkerProcess, message: Unfit) -> None:
        """It says why it cannot start: another one could not either, unless one could before."""
        if self._births.any and self._config.serving is not None:
            worker.kill(f"{message.message}; {message.hint}" if message.hint else message.message)
            return
        self._closing = True
        self._emit(message)

    async def _mourn(self, worker: WorkerProcess, death: WorkerDeath) -> None:
        """A worker is gone: attempts without a verdict are handed back, and another one takes its place."""
        if self._closing:
            return
        if not (worker.ready or worker.draining):
            self._unable(death.reason, f"see `{worker.log}`")
        elif worker.attempts or not worker.draining:
            self._lost += 1
            self._note("worker.lost", f"worker {worker.number}: {death.reason}")
        if worker.attempts:
            self._group.create_task(self._remains.sweep(list(worker.attempts)))
        for verdict in await self._remains.read_verdicts(worker.number, frozenset(worker.attempts)):
            worker.forget(verdict.attempt)
            self._emit(Done(verdict=verdict))
        for attempt in list(worker.attempts.values()):
            self._finish(attempt, worker_lost(attempt, death.reason, own=death.own))
        self._emit(Gone(worker=worker.number))
        self._staff()
        await self._placement.wake()

    def _recycle(self, worker: WorkerProcess, reason: str) -> None:
        """Another one takes its place first; until that is ready it goes on as before."""
        worker.outgoing = reason
        self._staff()

    def retire(self, worker: WorkerProcess, reason: str, later: bool = False) -> None:
        """It takes nothing new; another takes its place, now or `later`, when it is gone."""
        if not (worker.draining or worker.solo):
            self._recycled += 1
        self._drain(worker, reason, later=later and not worker.outgoing)
        self._staff()

    def _drain(self, worker: WorkerProcess, reason: str, later: bool = False) -> None:
        """It takes nothing new, and leaves when it is empty."""
        if not worker.draining:
            worker.draining = True
            worker.replaced = not later
            self._note("worker.retired", f"worker {worker.number}: {reason}")
        if not worker.attempts:
            worker.leave()
            return
        draining = [w for w in self._roster if w.draining and not (w.solo or w.emptied) and w.attempts]
        if len(draining) > max(1, self._config.workers):
            self._empty(draining[0])

    def _empty(self, worker: WorkerProcess) -> None:
        """Too many drain: what it hosts goes on elsewhere."""
        worker.emptied = True
        for attempt in worker.attempts:
            failure = interrupted("its worker is being replaced")
            worker.send(Cancel(attempt=attempt, failure=failure))

    async def _patrol(self) -> None:
        """Each second: who hangs, who does not come up, who is too fat, who has hosted enough."""
        self._running.tick()
        for worker in self._roster:
            if worker.silent(self._config.silence, self._config.silence * LONGEST_SILENCE):
                reason = f"hung: no sign of life for {worker.silence:.0f} s {worker.busy_with()}"
                worker.kill(reason, hung=True)
            elif not worker.ready and self._overdue(worker):
                worker.kill(f"not ready after {worker.age:.0f} s")
            elif worker.draining or worker.outgoing or worker.solo or not worker.ready:
                continue
            elif worker.rss > self._config.worker_memory and worker.hosted:  # else it would never host any
                self._recycle(worker, f"uses {worker.rss >> 20} MiB")
            elif worker.hosted >= self._config.recycle_after:
                self._recycle(worker, f"hosted {worker.hosted} attempts")
        self._staff()
        if self._births.unfit:
            await self._placement.wake()

    def _overdue(self, worker: WorkerProcess) -> bool:
        return self._config.serving is not None and worker.age > self._config.serving.starting

    def _note(self, kind: str, message: str) -> None:
        self._emit(Noted(kind=kind, message=message))

    def _finish(self, attempt: Attempt, failure: Failure) -> None:
        self._emit(Done(verdict=Verdict(attempt=attempt.id, token=self._welcome.token, failure=failure)))


def _scaling(config: RunConfig, share: int) -> Scaling:
    """A run has its workers from its start to its end; a server as many as it needs."""
    if config.serving is None:
        return Scaling(config.workers, config.workers, share, 0.0)
    least = max(1, min(config.serving.least_workers, config.workers))
    return Scaling(least, config.workers, share, config.serving.quiet)
