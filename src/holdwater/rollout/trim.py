"""Gives the memory of a quiet worker back, and never that of a busy one: it would stall its loop.

Quiet is what has been measured for some seconds: no call was served, and next to no time was spent. What the
allocator can do is in `allocator.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..core.records import MiB
from .allocator import resident
from .calls import Calls
from .scope import Note

LOOK_SECONDS = 1.0
QUIET_LOOKS = 3  # one after another, before anything is done
BUSY = 0.02  # of a core, from which on a worker is not quiet; an idle one uses less than half of it
WORTH_IT = 8 * MiB  # of growth before a trim, and of effect before it is told

GiveBack = Callable[[], object]
Traffic = tuple[int, int]  # calls that came so far, and those that are being served


class Trimmer:
    """One worker's. `look` is its duty, each second; without `give_back` it only looks."""

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
        self._thread = Calls("trim")
        self._asked = False
        self._quiet = 0
        self._floor = resident()
        self._calls = 0
        self._looked, self._worked = time.monotonic(), time.process_time()

    def ask(self) -> None:
        """Memory is short: trim as soon as it is quiet, however little it has grown."""
        self._asked = True

    async def look(self) -> None:
        """Trim if it has been quiet for a while and has grown since the last time."""
        size = resident()
        self._floor = min(self._floor, size)
        self._quiet = 0 if self._busy() else self._quiet + 1
        grown = size - self._floor >= WORTH_IT
        if self._quiet >= QUIET_LOOKS and (grown or self._asked) and not self._thread.alive:
            await self._trim()

    def _busy(self) -> bool:
        """Whether calls came, are being served, or time was spent, since the last look."""
        (calls, serving), now, worked = self._traffic(), time.monotonic(), time.process_time()
        came = calls != self._calls
        toiled = worked - self._worked > BUSY * (now - self._looked)
        self._calls, self._looked, self._worked = calls, now, worked
        return bool(serving) or came or toiled

    async def _trim(self) -> None:
        self._asked = False
        if self._give_back is None:
            return
        before, begun = resident(), time.monotonic()
        self._collect()
        try:
            await self._thread.call(self._give_back)
        except Exception as error:  # boundary: who cannot trim goes on as it is  # noqa: BLE001
            self._give_back = None
            self._note("trim.failed", f"{type(error).__name__}: {error}")
        self._floor = resident()
        given, took = before - self._floor, time.monotonic() - begun
        if given >= WORTH_IT:
            self._note("worker.trimmed", f"gave back {given // MiB} MiB in {took * 1000:.0f} ms")
