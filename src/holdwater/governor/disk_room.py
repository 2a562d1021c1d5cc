"""Classifies the free disk space as ample, low or full, without flapping between levels. Pure.

`disks.py` reads the disks; `run/resources/disk_space.py` acts on a level.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..core.records import Record
from ..core.sizes import HEADROOM_PART, MOST_HEADROOM, compute_headroom
from .disks import FULL_BELOW
from .resource_reading import DiskReading

EASE_FACTOR = 1.5  # a level is left at this multiple of the room at which it began
CALM_READINGS = 2  # readings with ample room before the level is ample again
LONGEST_CALM = 60.0


class DiskLevel(IntEnum):
    """The levels are ordered: the worst of several is the largest."""

    AMPLE = 0
    LOW = 1  # no attempt is admitted
    FULL = 2  # writes fail, or will fail soon


class DiskRoom(Record, frozen=True):
    """The bytes left of one disk or budget, and the thresholds of its levels."""

    left: int
    low: int
    full: int

    def level(self, before: DiskLevel) -> DiskLevel:
        if self.left < self.full * (EASE_FACTOR if before >= DiskLevel.FULL else 1):
            return DiskLevel.FULL
        return (
            DiskLevel.LOW
            if self.left < self.low * (EASE_FACTOR if before >= DiskLevel.LOW else 1)
            else DiskLevel.AMPLE
        )


class DiskLevels:
    """Tracks the level, and how often recovered room turned out too small."""

    def __init__(self, longest_calm: float = LONGEST_CALM) -> None:
        self.level = DiskLevel.AMPLE
        self._longest = max(CALM_READINGS, min(longest_calm, LONGEST_CALM))
        self._calm = 0
        self._pause: float = CALM_READINGS

    def next(self, rooms: Iterable[DiskRoom], *, given: bool = False) -> DiskLevel:
        """Return the level after this reading; `given`: part of the reserve was used since the last one."""
        found = (
            DiskLevel.FULL
            if given
            else max((room.level(self.level) for room in rooms), default=DiskLevel.AMPLE)
        )
        if found is not DiskLevel.AMPLE:
            self._calm = 0
        elif self.level is not DiskLevel.AMPLE:
            self._calm += 1
            found = DiskLevel.AMPLE if self._calm >= self._pause else DiskLevel.LOW
        self.level = found
        return found

    def record_shortage(self) -> None:
        """Record an attempt that ended for lack of disk space, however much is free now.

        Admission waits after that, longer each time.
        """
        if self.level is DiskLevel.AMPLE:
            self._pause = min(2 * self._pause, self._longest)
        self.level, self._calm = max(self.level, DiskLevel.LOW), 0

    def record_success(self) -> None:
        """Record an attempt that ended normally."""
        self._pause = CALM_READINGS


def make_disk_room(disk: DiskReading) -> DiskRoom:
    return DiskRoom(left=disk.free, low=compute_headroom(disk.total), full=FULL_BELOW)


def make_budget_room(budget: int, used: int) -> DiskRoom:
    """Return the room of a budget. A budget is never full: writes beyond it still succeed."""
    return DiskRoom(left=max(0, budget - used), low=min(MOST_HEADROOM, budget // HEADROOM_PART), full=0)
