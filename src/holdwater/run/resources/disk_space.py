"""Watches the disks of a run: holds admission when room is low, keeps the reserve, stops a stuck run.

`governor/disks.py` makes the decisions. Any process may take from the reserve at once; this module
notices it afterwards. The directories' total use is measured only if it has a budget.
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

from ...core.config import RunConfig
from ...core.errors import HoldwaterError, RunStopped
from ...core.failures import DISK
from ...core.limits import compute_headroom
from ...core.records import FailureOrigin, MiB, Verdict
from ...governor.disks import (
    EASE_FACTOR,
    DiskLevel,
    DiskLevels,
    make_budget_room,
    make_disk_room,
    measure_usage,
    read_disks,
)
from ...governor.resource_reading import DiskReading, ResourceBound
from ...ledger.directory import RunDirectory
from ...ledger.disk_reserve import PIECES, DiskReserve
from ...rollout.periodic_task import PeriodicTask

LOOK_SECONDS = 1.0
MAKE_SECONDS = 10.0  # at least, before the reserve is made again
WALK_SECONDS = 5.0  # at least, between two walks
WALK_SHARE = 100  # pause after a walk, in multiples of its duration: 1 % of a core
LONGEST_WALK = 3600.0  # seconds
PAUSE = 0.2  # seconds between two tries of a commit that finds no room
MOST_VAIN_TRIES = 25  # tries of a commit that finds no room although the disk has ample


class DiskControls(NamedTuple):
    """The calls by which a `DiskSpace` controls and queries its run."""

    hold: Callable[[str], None]
    release: Callable[[str], None]
    note: Callable[[str, str], None]
    stop: Callable[[HoldwaterError], None]
    running: Callable[[], int]  # attempts that have been admitted


class ExternalStore(Protocol):
    """Another disk that attempts use, such as a docker daemon's. The run's budget applies to it."""

    def disk(self) -> DiskReading: ...

    def used_bytes(self) -> int:
        """Return the bytes that count against the budget."""


class DiskSpace:
    """The disks of one run. Outside `watch_run` only `relieve` has an effect: it releases the reserve."""

    def __init__(self, config: RunConfig, directory: RunDirectory, places: Mapping[str, Path]) -> None:
        self._budget = config.disk
        self._patience = config.disk_patience
        self._places = {name: places[name] for name in ("run", "scratch")}
        self._reserve = DiskReserve(directory.reserve)
        self._first = self._reserve.oldest_piece
        self._levels = DiskLevels(longest_calm=self._patience / 4)
        self._noted = DiskLevel.AMPLE
        self._store: ExternalStore | None = None
        self._disks = self._read_disks()
        self.used = 0  # bytes, from the last walk or from the store
        self._walk_at = 0.0
        self._short = 0.0  # seconds without room, since an attempt last ended normally
        self._looked = time.monotonic()
        self._make_at = 0.0
        self._hurried = threading.Event()
        self._hurried.set()

    def change(self, config: RunConfig) -> None:
        """Apply the budget of this configuration from now on."""
        self._budget = config.disk

    @contextmanager
    def watch_run(self, run: DiskControls) -> Iterator[tuple[PeriodicTask, ...]]:
        """Watch the disks in this block; yield the periodic tasks that must run meanwhile."""
        self._controls = run
        self._hurried.clear()
        self._read(given=False)
        if self.level is DiskLevel.AMPLE:
            self._make_reserve()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="holdwater-space")
        watch = PeriodicTask("space", LOOK_SECONDS, self.look)
        walk = PeriodicTask("disk use", LOOK_SECONDS, self._walk, LONGEST_WALK)
        try:
            yield watch, walk
        finally:
            self.stop_waiting()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Remove the reserve at the end of the run."""
        self._reserve.remove()

    def stop_waiting(self) -> None:
        """From now on, nothing waits for room."""
        self._hurried.set()

    def use_store(self, store: ExternalStore) -> None:
        """Add a disk that attempts use and apply the budget to it. To be called before `watch_run`."""
        self._store = store
        self._disks = self._read_disks()

    @property
    def shown_disk(self) -> DiskReading:
        """The disk to show to users."""
        return self._store.disk() if self._store else self._run_disk

    @property
    def level(self) -> DiskLevel:
        return self._levels.level

    @property
    def budget(self) -> int | None:
        return self._budget

    def bound(self) -> ResourceBound:
        """Return the tightest limit on disk: the budget or a file system."""
        if self._store is not None:  # it fills and empties faster than the periodic look
            self.used = self._store.used_bytes()
            self._disks = (*self._own, self._store.disk())
        bounds = [
            ResourceBound(DISK, d.total, d.total - d.free, f"`{d.path}`") for d in self._disks if d.total
        ]
        if self._budget is not None:
            bounds.append(ResourceBound(DISK, self._budget, self.used, "`--disk`"))
        unknown = ResourceBound(DISK, sys.maxsize, 0, "no file system reports its size")
        return min(bounds, key=lambda bound: bound.room, default=unknown)

    def relieve(self, tries: int) -> bool:
        """Return whether to retry a commit that found no room `tries` times. Runs in the ledger's thread."""
        if self._reserve.release_piece():
            return True
        if self._hurried.wait(PAUSE):
            return False
        return tries < MOST_VAIN_TRIES or self.level is not DiskLevel.AMPLE

    def on_settled(self, verdict: Verdict) -> None:
        """Take note of a committed verdict: one for lack of room holds admission at once."""
        where = verdict.failure.where if verdict.failure else None
        if where is not FailureOrigin.INTERRUPTED:
            self._short = 0.0
            self._levels.record_success()
        elif verdict.failure and verdict.failure.kind == DISK:
            self._levels.record_shortage()
            self._hold_or_release()
            self._note_level()

    async def look(self) -> None:
        """Each second: measure free space and the reserve, and act on them."""
        first = self._reserve.oldest_piece
        given, self._first = first > self._first, first
        if given:
            left = f"{self._reserve.pieces} pieces with {self._reserve.bytes} bytes are left"
            self._controls.note("reserve.given", f"the disk had no room for a required write: {left}")
        self._read(given)
        self._note_level()
        self._count_shortage()
        if self.level is DiskLevel.AMPLE and self._reserve.pieces < PIECES and self._looked > self._make_at:
            await self._in_thread(self._make_reserve)

    def _read(self, given: bool) -> None:
        self._disks = self._read_disks()
        rooms = [make_disk_room(disk) for disk in self._disks if disk.total]
        if self._budget is not None:
            rooms.append(make_budget_room(self._budget, self.used))
        self._levels.next(rooms, given=given)
        self._hold_or_release()

    def _read_disks(self) -> tuple[DiskReading, ...]:
        self._own = read_disks(self._places, Path("/proc"))
        if self._store is None:
            return self._own
        self.used = self._store.used_bytes()
        return (*self._own, self._store.disk())

    def _hold_or_release(self) -> None:
        (self._controls.release if self.level is DiskLevel.AMPLE else self._controls.hold)(DISK)

    def _note_level(self) -> None:
        if self.level is not self._noted:
            self._noted = self.level
            self._controls.note(f"disk.{self.level.name.lower()}", self._describe_room())

    def _make_reserve(self) -> int:
        free = self._run_disk.free
        made = self._reserve.make_pieces(free if self._budget is None else min(free, self._budget))
        self._first = self._reserve.oldest_piece
        self._make_at = time.monotonic() + MAKE_SECONDS
        return made

    @property
    def _run_disk(self) -> DiskReading:
        return next(disk for disk in self._disks if "run" in disk.names)

    def _count_shortage(self) -> None:
        """Count time without room while nothing can go on: the disk is full, or low and no attempt runs."""
        now = time.monotonic()
        since, self._looked = now - self._looked, now
        if self.level is DiskLevel.FULL or (self.level is DiskLevel.LOW and not self._controls.running()):
            self._short += since
        if self.level is not DiskLevel.AMPLE and self._short > self._patience:
            self._controls.stop(self._make_stop_error())

    def _make_stop_error(self) -> RunStopped:
        waited = f"and no space was freed within {self._patience:g} s"
        if (
            self._budget is not None
            and make_budget_room(self._budget, self.used).level(self.level) is not DiskLevel.AMPLE
        ):
            budget = f"the disk budget is used up: {_size(self.used)} of {_size(self._budget)}"
            hint = "make space in the run directory, or `holdwater resume` with a larger `--disk`"
            return RunStopped(f"{budget}, {waited}", hint)
        return RunStopped(
            f"the disk is full: {self._describe_room()}, {waited}",
            "make space, then `holdwater resume`; `--sandbox-disk` bounds what one sandbox may use",
        )

    def _describe_room(self) -> str:
        """Describe the free space of the tightest disk, the space needed, and the budget if there is one."""
        tightest = min((d for d in self._disks if d.total), key=lambda d: d.free, default=self._run_disk)
        enough = compute_headroom(tightest.total) * (1 if self.level is DiskLevel.AMPLE else EASE_FACTOR)
        free = f"{_size(tightest.free)} of {_size(tightest.total)} are free in `{tightest.path}`"
        budget = f", {_size(self.used)} of {_size(self._budget)} are used" if self._budget is not None else ""
        return f"{free}, {_size(int(enough))} are needed to go on{budget}"

    async def _walk(self) -> None:
        if self._budget is None or self._store is not None or time.monotonic() < self._walk_at:
            return
        began = time.monotonic()
        self.used = await self._in_thread(self._walk_directories)
        self._walk_at = time.monotonic() + max(WALK_SECONDS, WALK_SHARE * (time.monotonic() - began))

    def _walk_directories(self) -> int:
        run, scratch = self._places["run"].absolute(), self._places["scratch"].absolute()
        places = [run] if scratch.is_relative_to(run) else [run, scratch]
        return sum(measure_usage(place, self._hurried.is_set) for place in places)

    async def _in_thread(self, work: Callable[[], int]) -> int:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _size(count: int) -> str:
    return f"{count / MiB:.1f} MiB"
