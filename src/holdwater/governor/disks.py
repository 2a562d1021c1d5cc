"""Reads the file systems that a run writes to, and classifies their free space as ample, low or full.

The levels do not flap. `run/resources/disk_space.py` acts on them: it pauses and stops runs. A worker
detects a full disk during an attempt (`DiskWatch`), because a failure at that time may not be the
attempt's fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from ..core.limits import HEADROOM_PART, MOST_HEADROOM, compute_headroom
from ..core.records import MiB, Record
from ..kernel_files import read_text
from ..ledger.disk_reserve import DiskReserve
from ..ledger.durable_files import is_disk_full
from .resource_reading import DiskReading

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
MEMORY_DEVICES = ("/dev/ram", "/dev/zram")  # disks in memory, with any file system
FULL_BELOW = 1 * MiB  # a file system with less free space counts as full
DEEPEST_LEVEL = 100  # nested directories that are measured: each is held open
EASE_FACTOR = 1.5  # a level is left at this multiple of the room at which it began
CALM_READINGS = 2  # readings with ample room before the level is ample again
LONGEST_CALM = 60.0
FRESH_SECONDS = 0.01  # a result this old is reused: quick attempts would check thousands of times


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


def read_disks(places: Mapping[str, Path], proc: Path) -> tuple[DiskReading, ...]:
    """Return one reading for each file system, with the names of the places on it."""
    devices: dict[int, list[tuple[str, Path]]] = {}
    for name, place in places.items():
        there = find_existing(place)
        devices.setdefault(there.stat().st_dev, []).append((name, there))
    types = _read_types(proc)
    return tuple(_read_disk(here, *types.get(device, ("", False))) for device, here in devices.items())


def is_full(place: Path) -> bool:
    try:
        told = os.statvfs(place)
    except FileNotFoundError:
        told = os.statvfs(find_existing(place))
    return told.f_blocks > 0 and told.f_bavail * told.f_frsize < FULL_BELOW


def measure_usage(place: Path | str, stopped: Callable[[], bool] = lambda: False, depth: int = 0) -> int:
    """Return the bytes of disk below `place`, in constant memory; entries may change meanwhile."""
    total = 0
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                total += _measure_entry(entry, stopped, depth)
    except OSError:
        pass  # it was removed, or is not readable
    return total


def _measure_entry(entry: os.DirEntry[str], stopped: Callable[[], bool], depth: int) -> int:
    try:
        own = entry.stat(follow_symlinks=False).st_blocks * 512
        below = entry.is_dir(follow_symlinks=False) and depth < DEEPEST_LEVEL and not stopped()
    except OSError:
        return 0
    return own + (measure_usage(entry.path, stopped, depth + 1) if below else 0)


def _read_disk(here: list[tuple[str, Path]], filesystem: str, memory: bool) -> DiskReading:
    path = here[0][1]
    told = os.statvfs(path)
    return DiskReading(
        path=str(path),
        free=told.f_bavail * told.f_frsize,
        total=told.f_blocks * told.f_frsize,
        memory=memory,
        names=tuple(name for name, _ in here),
        filesystem=filesystem,
    )


def find_existing(place: Path) -> Path:
    """Return `place`, or its nearest existing ancestor."""
    place = place.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _read_types(proc: Path) -> dict[int, tuple[str, bool]]:
    """Return the type of each mounted file system by its device, and whether its bytes are memory."""
    found = {}
    for line in read_text(proc / "self/mountinfo").splitlines():
        mount, _, rest = line.partition(" - ")
        kind, source, *_ = f"{rest}  ".split(" ")
        major, minor = mount.split(" ", 3)[2].split(":")
        memory = kind in IN_MEMORY or source.startswith(MEMORY_DEVICES)
        found[os.makedev(int(major), int(minor))] = kind, memory
    return found


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
