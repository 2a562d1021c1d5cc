"""Periodic duties of a conductor or a worker: a failure is noted and the duty goes on; it cancels nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..core.errors import RunStopped

LONGEST = 30.0  # seconds that one turn of a duty may take


class Duty:
    """Something that is done again and again while a run lasts."""

    def __init__(
        self, name: str, every: float, work: Callable[[], Awaitable[None]], longest: float = LONGEST
    ):
        self.name = name
        self._every = every
        self._work = work
        self._longest = longest

    async def perform(self, note: Callable[[str, str], None]) -> None:
        """Do it until cancelled. Only an error that stops the run gets out."""
        while True:
            await asyncio.sleep(self._every)
            try:
                async with asyncio.timeout(self._longest):
                    await self._work()
            except RunStopped:
                raise
            except TimeoutError:
                note("duty.hung", f"{self.name}: not done after {self._longest:g} s")
            except Exception as error:  # boundary: a duty goes on  # noqa: BLE001
                note("duty.failed", f"{self.name}: {type(error).__name__}: {error}")
