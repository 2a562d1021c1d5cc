"""Frees memory in a worker: collects cyclic garbage, and gives unused memory back to the kernel.

Our own code leaves no cycles; the code of agents and suites may. The interpreter alone would collect by the
number of objects: in the middle of a call, or not for hours. `allocator.py` gives the memory back.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

from ..core.records import MiB
from .allocator import measure_resident
from .scope import Note
from .user_calls import UserCalls

LOOK_SECONDS = 1.0
QUIET_LOOKS = 3  # quiet looks in a row before a trim
BUSY = 0.02  # share of a core above which a worker is not quiet; an idle worker uses less than half of it
LEAST_TRIM = 8 * MiB  # growth that is worth a trim, and effect that is worth an event

ATTEMPT_GROWTH = 16 * MiB  # growth that triggers a collection if an attempt has ended since the last one
IDLE_GROWTH = 64 * MiB  # the same if no attempt has ended; or a quarter of the whole, if that is more
URGENT_GROWTH = 96 * MiB  # growth that triggers a collection without waiting for an idle moment
LONGEST_WAIT = 2.0  # seconds to wait for an idle moment at most
IDLE = 0.3  # busy share of the loop's time below which a moment is idle
_NEVER = 1 << 30

GiveBack = Callable[[], object]
Traffic = tuple[int, int]  # model calls received so far, and calls in progress


class MemoryTrimmer:
    """Gives memory of one worker back when it is quiet: a trim would stall a busy loop.

    A worker is quiet after some seconds without model calls and with next to no CPU time. `look` runs each
    second; without `give_back` it only measures.
    """

    def __init__(
        self,
        traffic: Callable[[], Traffic],
        collect: Callable[[], object],
        give_back: GiveBack | None,
        note: Note,
    ) -> None:
        self._traffic = traffic
        self._collect = collect
        self._give_back = give_back
        self._note = note
        self._thread = UserCalls("trim")
        self._requested = False
        self._quiet = 0
        self._floor = measure_resident()
        self._calls = 0
        self._looked, self._worked = time.monotonic(), time.process_time()

    def request_trim(self) -> None:
        """Trim as soon as the worker is quiet, even if it has grown little: memory is short."""
        self._requested = True

    async def look(self) -> None:
        """Trim if the worker has been quiet for a while and has grown since the last trim."""
        size = measure_resident()
        self._floor = min(self._floor, size)
        self._quiet = 0 if self._busy() else self._quiet + 1
        grown = size - self._floor >= LEAST_TRIM
        if self._quiet >= QUIET_LOOKS and (grown or self._requested) and not self._thread.alive:
            await self._trim()

    def _busy(self) -> bool:
        """Return whether calls arrived, are in progress, or CPU time was used since the last look."""
        (calls, serving), now, worked = self._traffic(), time.monotonic(), time.process_time()
        came = calls != self._calls
        toiled = worked - self._worked > BUSY * (now - self._looked)
        self._calls, self._looked, self._worked = calls, now, worked
        return bool(serving) or came or toiled

    async def _trim(self) -> None:
        self._requested = False
        if self._give_back is None:
            return
        before, begun = measure_resident(), time.monotonic()
        self._collect()
        try:
            await self._thread.call(self._give_back)
        except Exception as error:  # boundary: a worker that cannot trim goes on without  # noqa: BLE001
            self._give_back = None
            self._note("trim.failed", f"{type(error).__name__}: {error}")
        self._floor = measure_resident()
        given, took = before - self._floor, time.monotonic() - begun
        if given >= LEAST_TRIM:
            self._note("worker.trimmed", f"gave back {given // MiB} MiB in {took * 1000:.0f} ms")


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
