"""Detects a full disk during an attempt, because a failure at that time may not be the attempt's fault.

`run/resources/disk_space.py` is the conductor's watch, which pauses and stops runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..governor.disks import is_full
from ..ledger.disk_reserve import DiskReserve
from ..ledger.durable_files import is_disk_full

FRESH_SECONDS = 0.01  # a result this old is reused: quick attempts would check thousands of times


class DiskFaults:
    """Records whether a write of an attempt failed on a full disk, even if other code caught the error."""

    def __init__(self) -> None:
        self.occurred = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: raised again
            self.occurred = self.occurred or is_disk_full(error)
            raise


class DiskWatch:
    """Checks the disks of one process, each second and on demand, and whether the reserve was used."""

    def __init__(self, reserve: DiskReserve, places: set[Path]) -> None:
        self._reserve = reserve
        self._places = [place for place in places if not places & set(place.parents)]
        self._full_at = self._looked = 0.0
        self._first = reserve.oldest_piece

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked < FRESH_SECONDS:
            return
        self._looked, self._first = now, self._reserve.oldest_piece
        if any(is_full(place) for place in self._places):
            self._full_at = now

    def since(self) -> Callable[[], bool]:
        """Return a check whether one of the disks has been full since this call."""
        self.look()
        began, first = time.monotonic(), self._first

        def full() -> bool:
            self.look()
            return self._full_at >= began or self._first > first

        return full
