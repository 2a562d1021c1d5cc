"""Reads the file systems that a run writes to: the free space of each, and whether it is in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..core.records import MiB
from .kernel_files import read_text
from .resource_reading import DiskReading

IN_MEMORY = {"tmpfs", "ramfs"}
FULL_BELOW = 1 * MiB  # a file system with less free space counts as full
DEEPEST_LEVEL = 100  # nested directories that are measured: each is held open


def read_disks(places: Mapping[str, Path], proc: Path) -> tuple[DiskReading, ...]:
    """Return one reading for each file system, with the names of the places on it."""
    devices: dict[int, list[tuple[str, Path]]] = {}
    for name, place in places.items():
        there = find_existing(place)
        devices.setdefault(there.stat().st_dev, []).append((name, there))
    in_memory = _find_memory_devices(proc)
    return tuple(_read_disk(here, device in in_memory) for device, here in devices.items())


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


def _read_disk(here: list[tuple[str, Path]], memory: bool) -> DiskReading:
    path = here[0][1]
    told = os.statvfs(path)
    return DiskReading(
        path=str(path),
        free=told.f_bavail * told.f_frsize,
        total=told.f_blocks * told.f_frsize,
        memory=memory,
        names=tuple(name for name, _ in here),
    )


def find_existing(place: Path) -> Path:
    """Return `place`, or its nearest existing ancestor."""
    place = place.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _find_memory_devices(proc: Path) -> set[int]:
    found = set()
    for line in read_text(proc / "self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.split(" ", 1)[0] in IN_MEMORY:
            major, minor = mount.split(" ", 3)[2].split(":")
            found.add(os.makedev(int(major), int(minor)))
    return found
