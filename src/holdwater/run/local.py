"""The fleet of worker processes on this machine: started by exec, watched, recycled, buried.

Supervision is ours: a dead worker is seen at once, its attempts are handed back without blame, and no pool
stands between. What a worker does inside is in `rollout/worker.py`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from ..core.failures import interrupted, worker_lost
from ..core.records import Attempt, Failure, Verdict
from ..ledger.directory import RunDirectory
from ..rollout.duty import Duty
from ..rollout.wire import (
    Allow,
    Answered,
    Arrived,
    Asked,
    Beat,
    Broken,
    Cancel,
    Done,
    Held,
    Job,
    Noted,
    Progress,
    Ready,
    Said,
    Score,
    Steered,
    Take,
    Trim,
    Unfit,
    Unheld,
    Welcome,
)
from ..sandbox.sweep import sweep_attempts
from .fleet import Census, Emit
from .process import WorkerProcess

PATROL_SECONDS = 1.0
LONGEST_SILENCE = 9  # times the silence of an idle worker: without a beat, however busy
STILLBORN = 3  # workers that die before they are ready, one after another, stop the run


class LocalFleet:
    """`welcome.config.workers` processes, and one more for each suspect that must be alone."""

    def __init__(self, welcome: Welcome, emit: Emit, env: Mapping[str, str]) -> None:
        self._welcome = welcome
        self._env = env
        self._config = welcome.config
        self._emit = emit
        self._workers: dict[int, WorkerProcess] = {}  # bound: 2 x workers, and suspects
        self._waiting: dict[int, Failure | None] = {}  # attempts without a worker yet -> why they must end
        self._changed = asyncio.Condition()
        self._numbers = 0
        self._stillborn = 0
        self.news = 0
        self._steered: Steered | None = None  # the last: for workers that start later
        self._assembled = False  # all workers have been ready at once
        self._closing = False
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="holdwater-sweep")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> LocalFleet:
        self._group = await self._stack.enter_async_context(asyncio.TaskGroup())
        patrol = Duty("patrol", PATROL_SECONDS, self._patrol)
        self._patrol_task = self._group.create_task(patrol.perform(self._note))
        for _ in range(self._config.workers):
            self._spawn()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._patrol_task.cancel()
        for worker in self._workers.values():
            if worker.attempts or not worker.ready:
                worker.kill()
            else:
                worker.leave()
        await self._stack.aclose()
        self._threads.shutdown(wait=False)

    # What the scheduler asks for.

    async def start(self, job: Job) -> None:
        attempt = job.attempt
        self._waiting[attempt.id] = None
        worker = await (self._solo(attempt) if attempt.alone else self._shared(attempt))
        failure = self._waiting.pop(attempt.id)
        if worker is None:
            self._finish(attempt, failure or interrupted("no worker was left"))
            return
        worker.host(job)

    def interrupt(self, attempt: int, failure: Failure) -> None:
        if attempt in self._waiting:
            self._waiting[attempt] = failure
            self._group.create_task(self._wake())
        for worker in self._workers.values():
            if attempt in worker.attempts:
                worker.send(Cancel(attempt=attempt, failure=failure))

    def give_up(self, attempt: int) -> str:
        for worker in self._workers.values():
            if attempt in worker.attempts:
                worker.forget(attempt)
                self._retire(worker, f"attempt {attempt} hangs in it")
                return worker.whereabouts(attempt)
        return "no worker has it"

    def census(self) -> Census:
        workers = [w for w in self._workers.values() if not w.gone]
        phases = Counter(str(living.phase) for w in workers for living in w.living)
        unsettled = (one for w in workers for one in w.living if one.attempt in w.attempts)
        return Census(
            workers=len(workers),
            draining=sum(1 for w in workers if w.draining),
            pids=tuple(w.pid for w in workers),
            lag=max((w.lag for w in workers), default=0.0),
            phases=dict(phases),
            usage=Census.used(unsettled),
            uses={attempt: use for w in workers for attempt, use in w.uses().items()},
        )

    def allow(self, attempt: int, memory: int) -> None:
        for worker in self._workers.values():
            if attempt in worker.attempts:
                worker.send(Allow(attempt=attempt, memory=memory))

    def trim(self) -> str:
        quiet = [w for w in self._workers.values() if w.ready and not w.attempts and not w.gone]
        for worker in quiet:
            worker.send(Trim())
        return f"{len(quiet)} quiet workers give memory back" if quiet else ""

    def permit(self, leases: Mapping[int, int], room: int) -> None:
        workers = [w for w in self._workers.values() if w.ready and not w.gone]
        for worker in workers:
            worker.permit(leases, room // len(workers))

    def recycle(self, least: int, *, at_once: bool) -> str:
        """By what is left of ended attempts: what living ones use, they would use elsewhere too."""
        grown = [w for w in self._workers.values() if w.ready and not w.draining and w.left >= least]
        if not grown or any(w.draining for w in self._workers.values()):
            return ""
        worker = max(grown, key=lambda w: w.left)
        left = f"{worker.left >> 20} MiB"
        self._retire(worker, f"holds {left} of ended attempts, and memory is short", later=not at_once)
        return f"worker {worker.number} is replaced, which holds {left} of ended attempts"

    # What is said to attempts.

    def send(self, attempt: int, message: Take | Answered) -> bool:
        for worker in self._workers.values():
            if attempt in worker.attempts:
                worker.send(message)
                return True
        return False

    def score(self, group: int, together: bool) -> None:
        for worker in self._workers.values():
            if any(attempt.group == group for attempt in worker.attempts.values()):
                worker.send(Score(group=group, together=together))

    def steer(self, message: Steered) -> None:
        self._steered = message
        for worker in self._workers.values():
            if worker.ready:
                worker.send(message)

    # Who hosts an attempt.

    async def _shared(self, attempt: Attempt) -> WorkerProcess | None:
        """The ready worker that hosts least; None when the attempt is to end instead."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting[attempt.id] or self._least() is not None)
        return None if self._waiting[attempt.id] else self._least()

    async def _solo(self, attempt: Attempt) -> WorkerProcess | None:
        """A worker for a suspect, to itself."""
        while True:
            worker = self._spawn(solo=True)
            async with self._changed:
                await self._changed.wait_for(self._until_ready(worker, attempt))
            if self._waiting[attempt.id]:
                self._retire(worker, "its suspect is to end")
                return None
            if worker.ready and not worker.gone:
                return worker

    def _until_ready(self, worker: WorkerProcess, attempt: Attempt) -> Callable[[], bool]:
        return lambda: worker.ready or worker.gone or self._waiting[attempt.id] is not None

    def _least(self) -> WorkerProcess | None:
        shared = [w for w in self._workers.values() if w.ready and not (w.draining or w.solo or w.gone)]
        # No worker takes more than its share, or the first one up would get everything; but when one is
        # replaced, the others take over meanwhile.
        self._assembled = self._assembled or len(shared) >= self._config.workers
        hosts = len(shared) if self._assembled else self._config.workers
        free = (w for w in shared if len(w.attempts) * hosts < self._config.slots)
        return min(free, key=lambda w: len(w.attempts), default=None)

    # A worker's life.

    def _spawn(self, solo: bool = False) -> WorkerProcess:
        self._numbers += 1
        worker = WorkerProcess(self._numbers, self._welcome, self._env, solo=solo)
        self._workers[worker.number] = worker
        self._group.create_task(self._attend(worker))
        return worker

    async def _attend(self, worker: WorkerProcess) -> None:
        """Listen to a worker until it is dead, then bury it."""
        async for message in worker.messages():
            match message:
                case Ready():
                    worker.ready, self._stillborn = True, 0
                    if self._steered is not None:
                        worker.send(self._steered)
                    await self._wake()
                case Beat():
                    self.news += 1
                    worker.heard(message)
                case Done():
                    self._done(worker, message)
                    await self._wake()
                case Unfit():
                    self._closing = True
                    self._emit(message)
                case Noted() | Said() | Broken():
                    self._emit(message)
                case Arrived() | Progress() | Held() | Unheld() | Asked():
                    if message.attempt in worker.attempts:  # else it was given up, and has its verdict
                        self._emit(message)
        reason = await worker.buried()
        del self._workers[worker.number]
        await self._mourn(worker, reason)

    def _done(self, worker: WorkerProcess, message: Done) -> None:
        attempt = worker.forget(message.verdict.attempt)
        worker.hosted += 1
        if attempt is not None:
            self._emit(message)
        if message.tainted:
            self._retire(worker, f"attempt {message.verdict.attempt} left something running in it")
        elif worker.solo:
            self._retire(worker, "its suspect is done")
        elif worker.draining and not worker.attempts:
            worker.leave()

    async def _mourn(self, worker: WorkerProcess, reason: str) -> None:
        """A worker is gone: its attempts are handed back, and another one takes its place."""
        if self._closing:
            return
        if not worker.draining or worker.attempts:
            self._emit(Noted(kind="worker.lost", message=f"worker {worker.number}: {reason}"))
        if not worker.ready:
            self._stillborn += 1
            if self._stillborn >= STILLBORN:
                self._closing = True
                self._emit(Unfit(message=f"workers die at start-up: {reason}", hint=f"see `{worker.log}`"))
                return
        if worker.attempts:
            self._group.create_task(self._clear(list(worker.attempts)))
        for attempt in list(worker.attempts.values()):
            self._finish(attempt, worker_lost(attempt, reason))
        if not (worker.draining and worker.replaced) and not worker.solo:
            self._spawn()
        await self._wake()

    async def _clear(self, attempts: list[int]) -> None:
        """Remove what the attempts of a dead worker left: days are long, and the end of the run is far."""
        config = self._config
        scratch = Path(config.scratch) if config.scratch else RunDirectory(self._welcome.directory).scratch
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._threads, sweep_attempts, config.id, scratch, attempts)
        except OSError as error:
            self._note("sweep.failed", f"attempts {attempts}: {error}")

    def _retire(self, worker: WorkerProcess, reason: str, later: bool = False) -> None:
        """It takes nothing new and leaves when it is empty; another takes its place, now or `later`."""
        if not worker.draining:
            worker.draining = True
            worker.replaced = not later
            self._emit(Noted(kind="worker.retired", message=f"worker {worker.number}: {reason}"))
            if worker.replaced and not worker.solo and not self._closing:
                self._spawn()
        if not worker.attempts:
            worker.leave()
            return
        draining = [w for w in self._workers.values() if w.draining and not w.solo and w.attempts]
        if len(draining) > max(1, self._config.workers):
            for attempt in draining[0].attempts:
                failure = interrupted("its worker is being replaced")
                draining[0].send(Cancel(attempt=attempt, failure=failure))

    async def _patrol(self) -> None:
        """Each second: who hangs, who is too fat, who has hosted enough."""
        for worker in list(self._workers.values()):
            if worker.silent(self._config.silence, self._config.silence * LONGEST_SILENCE):
                worker.kill(f"hung: no sign of life for {worker.silence:.0f} s {worker.busy_with()}")
            elif worker.draining or not worker.ready:
                continue
            elif worker.rss > self._config.worker_memory and worker.hosted:  # else it would never host any
                self._retire(worker, f"uses {worker.rss >> 20} MiB")
            elif worker.hosted >= self._config.recycle_after:
                self._retire(worker, f"hosted {worker.hosted} attempts")

    def _note(self, kind: str, message: str) -> None:
        self._emit(Noted(kind=kind, message=message))

    def _finish(self, attempt: Attempt, failure: Failure) -> None:
        self._emit(Done(verdict=Verdict(attempt=attempt.id, token=self._welcome.token, failure=failure)))

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
