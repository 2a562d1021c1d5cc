"""Where attempts wait for a worker: the one that hosts their group, the freest one, or one of their own.

It only chooses; `local.py` starts and retires workers, and wakes the waiting attempts on each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ...core.records import Attempt, AttemptFailure
from ...rollout.worker_protocol import AttemptJob
from .process import WorkerProcess
from .roster import WorkerRoster
from .scaling import StartBackoff


class WorkerStarter(Protocol):
    """Starts and retires workers."""

    def spawn_solo(self) -> WorkerProcess | None: ...

    def retire(self, worker: WorkerProcess, reason: str) -> None: ...


class AttemptPlacement:
    """Places the attempts of one fleet."""

    def __init__(self, roster: WorkerRoster, births: StartBackoff, employer: WorkerStarter) -> None:
        self._roster = roster
        self._start_backoff = births
        self._starter = employer
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Condition()
        # waiting attempts -> why they must end, if they must; bound: the run's concurrency
        self._waiting: dict[int, AttemptFailure | None] = {}
        self.leased = 0  # bytes leased to waiting attempts, which cannot use them without a worker

    async def find(self, job: AttemptJob) -> WorkerProcess | AttemptFailure:
        """Wait for a worker that can host the attempt, or for the failure that ends it."""
        attempt = job.attempt
        self._waiting[attempt.id] = None
        self.leased += job.lease
        try:
            find = self._find_alone if attempt.alone else self._find_shared
            while (failure := self._waiting[attempt.id]) is None:
                worker = await find(attempt)
                if worker is not None and self._waiting[attempt.id] is None:
                    return worker
            return failure
        finally:
            self.leased -= job.lease
            del self._waiting[attempt.id]

    def end(self, attempt: int, failure: AttemptFailure) -> bool:
        """Return whether the attempt waits; if so, it ends with this failure when it is woken."""
        if attempt not in self._waiting:
            return False
        self._waiting[attempt] = failure
        return True

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _find_shared(self, attempt: Attempt) -> WorkerProcess | None:
        await self._wait_until(attempt, lambda: self._roster.place_for(attempt) is not None)
        return self._roster.place_for(attempt)

    async def _find_alone(self, attempt: Attempt) -> WorkerProcess | None:
        """Return a worker for a suspect attempt alone; the suspects of a group share one."""
        if home := self._roster.home_of(attempt.group):
            return home
        worker = self._roster.alone_with(attempt.group) or self._starter.spawn_solo()
        if worker is not None and await self._await_ready(worker, attempt):
            return worker
        await self._wait_until(attempt, lambda: self._start_backoff.due(self._clock()))
        return None

    async def _await_ready(self, worker: WorkerProcess, attempt: Attempt) -> bool:
        """Wait for a suspect's worker; return whether the worker can host it."""
        worker.suspect_group = attempt.group
        worker.awaited += 1
        try:
            await self._wait_until(attempt, lambda: worker.ready or worker.gone)
        finally:
            worker.awaited -= 1
        if self._waiting[attempt.id] and not (worker.awaited or worker.attempts):
            self._starter.retire(worker, "its suspect attempt was ended")
        return worker.ready and worker.open

    async def _wait_until(self, attempt: Attempt, true: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the attempt must end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting[attempt.id] is not None or true())
