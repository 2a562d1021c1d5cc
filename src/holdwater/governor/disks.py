"""The file systems that a run writes to: what is free on each, and which of them are memory in truth."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .kernel import text
from .reading import Disk

IN_MEMORY = {"tmpfs", "ramfs"}


def read_disks(places: Mapping[str, Path], proc: Path) -> tuple[Disk, ...]:
    """One for each file system, with the names of the places that lie on it."""
    devices: dict[int, list[tuple[str, Path]]] = {}
    for name, place in places.items():
        there = _existing(place)
        devices.setdefault(there.stat().st_dev, []).append((name, there))
    in_memory = _devices_in_memory(proc)
    return tuple(_disk(here, device in in_memory) for device, here in devices.items())


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


def _existing(place: Path) -> Path:
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
