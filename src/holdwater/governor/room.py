"""How much room the disks have: ample, low or full, without flapping between them. Pure.

What is read comes from `disks.py`; what follows from a level is done in `run/space.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from ..core.headroom import MOST, PART, headroom
from ..core.records import Record
from .disks import FULL
from .reading import Disk

EASE = 1.5  # times the room at which a level began, before it is left
CALM = 2  # readings with ample room before it counts as ample again
LONGEST_CALM = 60.0


class Level(IntEnum):
    """The worst of several is their largest."""

    AMPLE = 0
    LOW = 1  # nobody is admitted
    FULL = 2  # writes fail, or are about to


class Room(Record, frozen=True):
    """What is left of one disk or budget, in bytes, and where its levels begin."""

    left: int
    low: int
    full: int

    def level(self, before: Level) -> Level:
        if self.left < self.full * (EASE if before >= Level.FULL else 1):
            return Level.FULL
        return Level.LOW if self.left < self.low * (EASE if before >= Level.LOW else 1) else Level.AMPLE


class Levels:
    """Remembers the level, and how often room that came back was not enough."""

    def __init__(self, longest_calm: float = LONGEST_CALM) -> None:
        self.level = Level.AMPLE
        self._longest = max(CALM, min(longest_calm, LONGEST_CALM))
        self._calm = 0
        self._pause: float = CALM

    def next(self, rooms: Iterable[Room], *, given: bool = False) -> Level:
        """The level by this reading; `given`: some of the reserve was needed since the last one."""
        found = Level.FULL if given else max((room.level(self.level) for room in rooms), default=Level.AMPLE)
        if found is not Level.AMPLE:
            self._calm = 0
        elif self.level is not Level.AMPLE:
            self._calm += 1
            found = Level.AMPLE if self._calm >= self._pause else Level.LOW
        self.level = found
        return found

    def hurt(self) -> None:
        """An attempt ended for want of room, whatever is free now: the next ones wait, longer each time."""
        if self.level is Level.AMPLE:
            self._pause = min(2 * self._pause, self._longest)
        self.level, self._calm = max(self.level, Level.LOW), 0

    def recovered(self) -> None:
        """An attempt ended as it should."""
        self._pause = CALM


def room_of(disk: Disk) -> Room:
    return Room(left=disk.free, low=headroom(disk.total), full=FULL)


def room_in(budget: int, used: int) -> Room:
    """A budget is never full: what is over it can still be written."""
    return Room(left=max(0, budget - used), low=min(MOST, budget // PART), full=0)
