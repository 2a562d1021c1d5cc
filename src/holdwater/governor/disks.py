"""The file systems that a run writes to: what is free on each, and which of them are memory in truth."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from ..core.records import MiB
from .kernel import text
from .reading import Disk

IN_MEMORY = {"tmpfs", "ramfs"}
FULL = 1 * MiB  # a file system with less room than this counts as full
DEEPEST = 100  # directories in each other that are looked into: each is held open


def read_disks(places: Mapping[str, Path], proc: Path) -> tuple[Disk, ...]:
    """One for each file system, with the names of the places that lie on it."""
    devices: dict[int, list[tuple[str, Path]]] = {}
    for name, place in places.items():
        there = existing(place)
        devices.setdefault(there.stat().st_dev, []).append((name, there))
    in_memory = _devices_in_memory(proc)
    return tuple(_disk(here, device in in_memory) for device, here in devices.items())


def is_full(place: Path) -> bool:
    try:
        told = os.statvfs(place)
    except FileNotFoundError:
        told = os.statvfs(existing(place))
    return told.f_blocks > 0 and told.f_bavail * told.f_frsize < FULL


def used(place: Path | str, stopped: Callable[[], bool] = lambda: False, depth: int = 0) -> int:
    """Bytes of disk that are below `place`, or were while this looked; in memory that does not grow."""
    total = 0
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                total += _used(entry, stopped, depth)
    except OSError:
        pass  # it is gone, or not ours to look into
    return total


def _used(entry: os.DirEntry[str], stopped: Callable[[], bool], depth: int) -> int:
    try:
        own = entry.stat(follow_symlinks=False).st_blocks * 512
        below = entry.is_dir(follow_symlinks=False) and depth < DEEPEST and not stopped()
    except OSError:
        return 0
    return own + (used(entry.path, stopped, depth + 1) if below else 0)


def _disk(here: list[tuple[str, Path]], memory: bool) -> Disk:
    path = here[0][1]
    told = os.statvfs(path)
    return Disk(
        path=str(path),
        free=told.f_bavail * told.f_frsize,
        total=told.f_blocks * told.f_frsize,
        memory=memory,
        names=tuple(name for name, _ in here),
    )


def existing(place: Path) -> Path:
    """`place`, or where it will be made."""
    place = place.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def _devices_in_memory(proc: Path) -> set[int]:
    found = set()
    for line in text(proc / "self/mountinfo").splitlines():
        mount, _, kind = line.partition(" - ")
        if kind.split(" ", 1)[0] in IN_MEMORY:
            major, minor = mount.split(" ", 3)[2].split(":")
            found.add(os.makedev(int(major), int(minor)))
    return found
