"""Measures how late and how busy an event loop is, with a timer that reads the clock each time it fires.

The longest lag is kept until `take` is called. Heartbeats carry it to the conductor, which writes the
timeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

TICK = 0.05  # seconds between two readings: a stall may be measured too short by this much


def _do_nothing(busy: float) -> None:
    """Ignore a tick."""


class LoopLag:
    """Measures the running loop inside of `with`. Each tick calls `each` with the busy share of its time."""

    def __init__(self, each: Callable[[float], None] = _do_nothing) -> None:
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
        """Return the longest lag since the last call, in seconds, including one that still lasts."""
        longest, self._longest = max(self._longest, time.monotonic() - self._due), 0.0
        return longest

    def _arm(self) -> None:
        # Reads the clock, not the loop's own time, which stands still while a callback runs.
        self._armed, self._worked = time.monotonic(), time.thread_time()
        self._due = self._armed + TICK
        self._timer = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._due)
        busy = (time.thread_time() - self._worked) / max(now - self._armed, TICK)
        self._arm()
        self._each(busy)  # after arming the timer: the time that this takes is lag as well
