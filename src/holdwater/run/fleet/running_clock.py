"""A clock that stops while this process does not run.

A suspended conductor receives no heartbeats, and that must not count as silence of its workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_TICK = 3.0  # seconds: during a longer pause between two ticks this process did not run


class RunningClock:
    """Seconds in which this process ran. Its owner ticks about once a second."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ticked = now()
        self._ran = 0.0

    def tick(self) -> None:
        self._ran, self._ticked = self.time(), self._now()

    def time(self) -> float:
        since = self._now() - self._ticked
        return self._ran + since if since <= LONGEST_TICK else self._ran
