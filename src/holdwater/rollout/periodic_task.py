"""Periodic tasks of a conductor or a worker. A failure becomes an event; the task and all others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..core.errors import RunStopped

LONGEST = 30.0  # seconds that one run of a task may take


class PeriodicTask:
    """A function that is called at an interval while a run lasts."""

    def __init__(
        self, name: str, every: float, work: Callable[[], Awaitable[None]], longest: float = LONGEST
    ):
        self.name = name
        self._every = every
        self._work = work
        self._longest = longest

    async def perform(self, note: Callable[[str, str], None]) -> None:
        """Call the function until cancelled. Only `RunStopped` is raised; `note` receives other failures."""
        while True:
            await asyncio.sleep(self._every)
            try:
                async with asyncio.timeout(self._longest):
                    await self._work()
            except RunStopped:
                raise
            except TimeoutError:
                note("duty.hung", f"{self.name}: not done after {self._longest:g} s")
            except Exception as error:  # boundary: a periodic task goes on  # noqa: BLE001
                note("duty.failed", f"{self.name}: {type(error).__name__}: {error}")
