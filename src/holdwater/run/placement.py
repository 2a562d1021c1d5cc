"""Where attempts wait for a worker: the one that their group has, the freest one, or one of their own.

It chooses; workers are started and retired by `local.py`, which wakes those who wait when something changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ..core.records import Attempt, Failure
from ..rollout.wire import Job
from .process import WorkerProcess
from .roster import Roster
from .scaling import Births


class Employer(Protocol):
    """Who starts workers, and lets them go."""

    def spawn_solo(self) -> WorkerProcess | None: ...

    def retire(self, worker: WorkerProcess, reason: str) -> None: ...


class Placement:
    """One fleet's."""

    def __init__(self, roster: Roster, births: Births, employer: Employer) -> None:
        self._roster = roster
        self._births = births
        self._employer = employer
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Condition()
        # attempts that wait -> why they must end; bound: the run's concurrency
        self._waiting: dict[int, Failure | None] = {}
        self.leased = 0  # bytes that those who wait have leased, and cannot use without a worker

    async def find(self, job: Job) -> WorkerProcess | Failure:
        """Wait for the worker that hosts it, or for what ends it."""
        attempt = job.attempt
        self._waiting[attempt.id] = None
        self.leased += job.lease
        try:
            find = self._alone if attempt.alone else self._shared
            while (failure := self._waiting[attempt.id]) is None:
                worker = await find(attempt)
                if worker is not None and self._waiting[attempt.id] is None:
                    return worker
            return failure
        finally:
            self.leased -= job.lease
            del self._waiting[attempt.id]

    def end(self, attempt: int, failure: Failure) -> bool:
        """Whether it waits: then it ends with this, as soon as it is woken."""
        if attempt not in self._waiting:
            return False
        self._waiting[attempt] = failure
        return True

    async def wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _shared(self, attempt: Attempt) -> WorkerProcess | None:
        await self._until(attempt, lambda: self._roster.place_for(attempt) is not None)
        return self._roster.place_for(attempt)

    async def _alone(self, attempt: Attempt) -> WorkerProcess | None:
        """A worker that a suspect has to itself; the suspects of a group share one."""
        if home := self._roster.home_of(attempt.group):
            return home
        worker = self._roster.alone_with(attempt.group) or self._employer.spawn_solo()
        if worker is not None and await self._readied(worker, attempt):
            return worker
        await self._until(attempt, lambda: self._births.due(self._clock()))
        return None

    async def _readied(self, worker: WorkerProcess, attempt: Attempt) -> bool:
        """Wait for a suspect's worker; whether it can have it."""
        worker.suspects = attempt.group
        worker.awaited += 1
        try:
            await self._until(attempt, lambda: worker.ready or worker.gone)
        finally:
            worker.awaited -= 1
        if self._waiting[attempt.id] and not (worker.awaited or worker.attempts):
            self._employer.retire(worker, "its suspect is to end")
        return worker.ready and worker.open

    async def _until(self, attempt: Attempt, true: Callable[[], bool]) -> None:
        """Wait until that is so, or the attempt is to end."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._waiting[attempt.id] is not None or true())
