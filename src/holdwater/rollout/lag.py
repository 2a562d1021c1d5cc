"""How late an event loop is, and how busy: a timer that looks at the clock each time it fires.

The longest lag is kept until someone takes it: beats carry it to the conductor, which writes the timeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

TICK = 0.05  # seconds: a stall is seen but for this much of it


def _nothing(busy: float) -> None:
    """What a tick does by default."""


class Lag:
    """`with Lag() as lag`, on the loop that is measured. `each` is told at every tick how busy it was."""

    def __init__(self, each: Callable[[float], None] = _nothing) -> None:
        self._loop = asyncio.get_running_loop()
        self._each = each
        self._longest = 0.0

    def __enter__(self) -> Self:
        self._arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def take(self) -> float:
        """The longest lag since this was last asked, in seconds; one that lasts still counts."""
        longest, self._longest = max(self._longest, time.monotonic() - self._due), 0.0
        return longest

    def _arm(self) -> None:
        # By the clock and not by the loop's own time, which stands still while a callback runs.
        self._armed, self._worked = time.monotonic(), time.thread_time()
        self._due = self._armed + TICK
        self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._due)
        busy = (time.thread_time() - self._worked) / max(now - self._armed, TICK)
        self._arm()
        self._each(busy)  # armed before it: what this takes is lag as well
