"""Collects cyclic garbage when a worker's memory has grown, in an idle moment of its loop.

The interpreter alone would collect by the number of objects: in the middle of a call, or not for hours.
Our own code leaves no cycles; the code of agents and suites may.
"""

from __future__ import annotations

import gc
import time

from ..core.records import MiB
from .allocator import measure_resident

ATTEMPT_GROWTH = 16 * MiB  # growth that triggers a collection if an attempt has ended since the last one
IDLE_GROWTH = 64 * MiB  # the same if no attempt has ended; or a quarter of the whole, if that is more
URGENT_GROWTH = 96 * MiB  # growth that triggers a collection without waiting for an idle moment
LONGEST_WAIT = 2.0  # seconds to wait for an idle moment at most
IDLE = 0.3  # busy share of the loop's time below which a moment is idle
_NEVER = 1 << 30


class GarbageCollector:
    """Replaces the interpreter's full collections in one worker. `tick` is called many times a second.

    Objects that exist when it is created are frozen: they stay for good, and collections skip them.
    """

    def __init__(self) -> None:
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._floor = measure_resident()
        self._attempt_ended = False
        self._due: float | None = None
        self.collections = 0

    def on_attempt_ended(self) -> None:
        """Record that an attempt has ended: the objects that it left may be garbage."""
        self._attempt_ended = True

    def tick(self, busy: float) -> None:
        """Collect if memory has grown enough and the loop is idle; `busy` is the busy share of its time."""
        size = measure_resident()
        self._floor = min(self._floor, size)
        grown = size - self._floor
        if grown < (ATTEMPT_GROWTH if self._attempt_ended else max(IDLE_GROWTH, self._floor // 4)):
            return
        now = time.monotonic()
        self._due = self._due or now + LONGEST_WAIT
        if busy < IDLE or now > self._due or grown > URGENT_GROWTH:
            self.collect()

    def collect(self) -> None:
        """Free all unreachable objects. Stalls the loop meanwhile."""
        gc.collect()
        self.collections += 1
        self._attempt_ended, self._due, self._floor = False, None, measure_resident()
