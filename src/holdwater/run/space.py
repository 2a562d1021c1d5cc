"""Watches the disks of a run: holds admission when room is low, keeps the reserve, stops what cannot go on.

It decides by `governor/room.py`. Who needs the reserve takes from it at once, in whatever process: what is
gone is noticed here. What the directories use together is measured only where there is a budget for it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from ..core.config import RunConfig
from ..core.errors import HoldwaterError, RunStopped
from ..core.failures import DISK
from ..core.headroom import headroom
from ..core.records import MiB, Verdict, Where
from ..governor.disks import read_disks, used
from ..governor.reading import Bound, Disk
from ..governor.room import EASE, Level, Levels, room_in, room_of
from ..ledger.directory import RunDirectory
from ..ledger.reserve import PIECES, Reserve
from ..rollout.duty import Duty

LOOK_SECONDS = 1.0
MAKE_SECONDS = 10.0  # at least, before the reserve is made again
WALK_SECONDS = 5.0  # at least, between two walks
WALK_SHARE = 100  # times as long as a walk took, nothing is walked: 1 % of a core
LONGEST_WALK = 3600.0  # seconds
PAUSE = 0.2  # seconds between two tries of a commit that finds no room
VAIN = 25  # tries of a commit that finds no room although the disk has ample


class Levers(NamedTuple):
    """What a space does to its run, and what it asks of it."""

    hold: Callable[[str], None]
    release: Callable[[str], None]
    note: Callable[[str, str], None]
    stop: Callable[[HoldwaterError], None]
    running: Callable[[], int]  # attempts that have been admitted


class Store(Protocol):
    """A disk beside the run's own that attempts use: a docker daemon's. Its budget is the run's."""

    def disk(self) -> Disk: ...

    def used(self) -> int:
        """Bytes of it that count against the budget."""


class Space:
    """One run's. Before `begun` and after it only `relieve` does something: it gives the reserve."""

    def __init__(self, config: RunConfig, directory: RunDirectory, places: Mapping[str, Path]) -> None:
        self._budget = config.disk
        self._patience = config.disk_patience
        self._places = {name: places[name] for name in ("run", "scratch")}
        self._reserve = Reserve(directory.reserve)
        self._first = self._reserve.first
        self._levels = Levels(longest_calm=self._patience / 4)
        self._noted = Level.AMPLE
        self._store: Store | None = None
        self._disks = self._read_disks()
        self.used = 0  # bytes, at the last walk, or of the store
        self._walk_at = 0.0
        self._short = 0.0  # seconds without room, since an attempt last ended as it should
        self._looked = time.monotonic()
        self._make_at = 0.0
        self._hurried = threading.Event()
        self._hurried.set()

    @contextmanager
    def begun(self, run: Levers) -> Iterator[tuple[Duty, ...]]:
        """The run runs while this block does; its duties have to be performed."""
        self._run = run
        self._hurried.clear()
        self._read(given=False)
        if self.level is Level.AMPLE:
            self._make()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="holdwater-space")
        watch = Duty("space", LOOK_SECONDS, self.look)
        walk = Duty("disk use", LOOK_SECONDS, self._walk, LONGEST_WALK)
        try:
            yield (watch, walk) if self._budget is not None and self._store is None else (watch,)
        finally:
            self.hurry()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """The run has ended: its reserve is given back."""
        self._reserve.remove()

    def hurry(self) -> None:
        """From now on nothing waits for room."""
        self._hurried.set()

    def keep_in(self, store: Store) -> None:
        """Attempts use this disk, and its budget is what they are held to; before `begun`."""
        self._store = store
        self._disks = self._read_disks()

    @property
    def shown(self) -> Disk:
        """The disk that people want to see."""
        return self._store.disk() if self._store else self._run_disk

    @property
    def level(self) -> Level:
        return self._levels.level

    @property
    def budget(self) -> int | None:
        return self._budget

    def bound(self) -> Bound:
        """The tightest limit on disk: the budget, or what a file system has."""
        if self._store is not None:  # it is filled and emptied faster than we look
            self.used = self._store.used()
            self._disks = (*self._own, self._store.disk())
        bounds = [Bound(DISK, d.total, d.total - d.free, f"`{d.path}`") for d in self._disks if d.total]
        if self._budget is not None:
            bounds.append(Bound(DISK, self._budget, self.used, "`--disk`"))
        nobody = Bound(DISK, sys.maxsize, 0, "no file system tells")
        return min(bounds, key=lambda bound: bound.room, default=nobody)

    def relieve(self, tries: int) -> bool:
        """Whether a commit that found no room, `tries` times, is tried again. In the ledger's own thread."""
        if self._reserve.give():
            return True
        if self._hurried.wait(PAUSE):
            return False
        return tries < VAIN or self.level is not Level.AMPLE

    def settled(self, verdict: Verdict) -> None:
        """A verdict was committed: one for want of room holds admission at once."""
        where = verdict.failure.where if verdict.failure else None
        if where is not Where.INTERRUPTED:
            self._short = 0.0
            self._levels.recovered()
        elif verdict.failure and verdict.failure.kind == DISK:
            self._levels.hurt()
            self._hold()
            self._tell()

    async def look(self) -> None:
        """Each second: what is free, what of the reserve is gone, what follows from it."""
        first = self._reserve.first
        given, self._first = first > self._first, first
        if given:
            left = f"{self._reserve.pieces} pieces with {self._reserve.bytes} bytes are left"
            self._run.note("reserve.given", f"the disk had no room for what had to be written: {left}")
        self._read(given)
        self._tell()
        self._count()
        if self.level is Level.AMPLE and self._reserve.pieces < PIECES and self._looked > self._make_at:
            await self._in_thread(self._make)

    def _read(self, given: bool) -> None:
        self._disks = self._read_disks()
        rooms = [room_of(disk) for disk in self._disks if disk.total]
        if self._budget is not None:
            rooms.append(room_in(self._budget, self.used))
        self._levels.next(rooms, given=given)
        self._hold()

    def _read_disks(self) -> tuple[Disk, ...]:
        self._own = read_disks(self._places, Path("/proc"))
        if self._store is None:
            return self._own
        self.used = self._store.used()
        return (*self._own, self._store.disk())

    def _hold(self) -> None:
        (self._run.release if self.level is Level.AMPLE else self._run.hold)(DISK)

    def _tell(self) -> None:
        if self.level is not self._noted:
            self._noted = self.level
            self._run.note(f"disk.{self.level.name.lower()}", self._standing())

    def _make(self) -> int:
        free = self._run_disk.free
        made = self._reserve.make(free if self._budget is None else min(free, self._budget))
        self._first = self._reserve.first
        self._make_at = time.monotonic() + MAKE_SECONDS
        return made

    @property
    def _run_disk(self) -> Disk:
        return next(disk for disk in self._disks if "run" in disk.names)

    def _count(self) -> None:
        """Time without room counts while nothing can go on: with the disk full, or nothing left running."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        if self.level is Level.FULL or (self.level is Level.LOW and not self._run.running()):
            self._short += since
        if self.level is not Level.AMPLE and self._short > self._patience:
            self._run.stop(self._given_up())

    def _given_up(self) -> RunStopped:
        waited = f"and none came within {self._patience:g} s"
        if self._budget is not None and room_in(self._budget, self.used).level(self.level) is not Level.AMPLE:
            budget = f"the disk budget is used up: {_size(self.used)} of {_size(self._budget)}"
            hint = "make space in the run directory, or `holdwater resume` with a larger `--disk`"
            return RunStopped(f"{budget}, {waited}", hint)
        return RunStopped(
            f"the disk is full: {self._standing()}, {waited}",
            "make space, then `holdwater resume`; `--sandbox-disk` bounds what one sandbox may use",
        )

    def _standing(self) -> str:
        """What is free of the tightest disk, what has to be, and the budget where there is one."""
        tightest = min((d for d in self._disks if d.total), key=lambda d: d.free, default=self._run_disk)
        enough = headroom(tightest.total) * (1 if self.level is Level.AMPLE else EASE)
        free = f"{_size(tightest.free)} of {_size(tightest.total)} are free in `{tightest.path}`"
        budget = f", {_size(self.used)} of {_size(self._budget)} are used" if self._budget is not None else ""
        return f"{free}, {_size(int(enough))} are needed to go on{budget}"

    async def _walk(self) -> None:
        if time.monotonic() < self._walk_at:
            return
        began = time.monotonic()
        self.used = await self._in_thread(self._walked)
        self._walk_at = time.monotonic() + max(WALK_SECONDS, WALK_SHARE * (time.monotonic() - began))

    def _walked(self) -> int:
        run, scratch = self._places["run"].absolute(), self._places["scratch"].absolute()
        places = [run] if scratch.is_relative_to(run) else [run, scratch]
        return sum(used(place, self._hurried.is_set) for place in places)

    async def _in_thread(self, work: Callable[[], int]) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _size(count: int) -> str:
    return f"{count / MiB:.1f} MiB"
