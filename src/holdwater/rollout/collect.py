"""Collects cyclic garbage by the bytes that a worker has grown by, in an idle moment of its loop.

Left to itself the interpreter does it by the number of objects: in the middle of a call, or not for hours.
Our own attempts leave no cycles; what agents and suites leave is found here.
"""

from __future__ import annotations

import gc
import time

from ..core.records import MiB
from .allocator import resident

ENOUGH = 16 * MiB  # of growth, when an attempt has ended since the last collection
MUCH = 64 * MiB  # of growth, when none has; or a quarter of the whole, if that is more
TOO_MUCH = 96 * MiB  # of growth: no waiting for an idle moment
WAIT = 2.0  # seconds that it waits for one at most
IDLE = 0.3  # of the loop's time: below this a moment is idle
_NEVER = 1 << 30


class Collector:
    """One worker's; it takes the interpreter's full collections over. `tick` is called many times a second.

    What is there when it is made stays for good, and is not looked through again.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._floor = resident()
        self._ended = False
        self._due: float | None = None
        self.collections = 0

    def ended(self) -> None:
        """An attempt has ended: what it left may be garbage."""
        self._ended = True

    def tick(self, busy: float) -> None:
        """Collect, if there is reason to and the loop has the time."""
        size = resident()
        self._floor = min(self._floor, size)
        grown = size - self._floor
        if grown < (ENOUGH if self._ended else max(MUCH, self._floor // 4)):
            return
        now = time.monotonic()
        self._due = self._due or now + WAIT
        if busy < IDLE or now > self._due or grown > TOO_MUCH:
            self.collect()

    def collect(self) -> None:
        """Everything that nothing leads to any more is freed. Stalls the loop while it looks."""
        gc.collect()
        self.collections += 1
        self._ended, self._due, self._floor = False, None, resident()
