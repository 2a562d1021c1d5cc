"""Whether a disk was full while an attempt lived: what went wrong then may not be its own fault.

The conductor's watch, which pauses and stops runs, is `run/space.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..governor.disks import is_full
from ..ledger.disk import no_space
from ..ledger.reserve import Reserve

JUST_NOW = 0.01  # seconds: a look that is no older will do; quick attempts would look thousands of times


class Hurt:
    """Whether a write of an attempt's failed on a full disk of the run's, whoever caught that."""

    def __init__(self) -> None:
        self.by_disk = False

    @contextmanager
    def noticed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # boundary: raised again
            self.by_disk = self.by_disk or no_space(error)
            raise


class DiskWatch:
    """One process's: looks each second and when it is asked, and at what is gone of the reserve."""

    def __init__(self, reserve: Reserve, places: set[Path]) -> None:
        self._reserve = reserve
        self._places = [place for place in places if not places & set(place.parents)]
        self._full_at = self._looked = 0.0
        self._first = reserve.first

    def look(self) -> None:
        now = time.monotonic()
        if now - self._looked < JUST_NOW:
            return
        self._looked, self._first = now, self._reserve.first
        if any(is_full(place) for place in self._places):
            self._full_at = now

    def since(self) -> Callable[[], bool]:
        """Whether, from now on, one of the disks was full."""
        self.look()
        began, first = time.monotonic(), self._first

        def full() -> bool:
            self.look()
            return self._full_at >= began or self._first > first

        return full
