"""Limits the number of concurrent attempts by CPU: reads cores, use and waiting, and adapts the limit.

The limit starts small and grows while there is spare CPU. When tasks wait for CPU and the run itself uses
much of it, the limit is lowered: running attempts continue, and fewer are started. A machine that is busy
with other work does not count against a run that uses little.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..core.records import Record
from ..kernel_files import read_number, read_text
from .cgroups import OwnCgroups
from .resource_reading import FleetCensus

TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 1.0
WINDOW_SECONDS = 2.0  # the period over which shares are measured
SETTLING_SECONDS = 10.0  # seconds before a lowered limit can be lowered again
STALLED_SHARE = 0.8  # share of time in which some task waits: crowded, if the run is above `BUSY_SHARE`
BUSY_SHARE = 0.5  # of the cores
FULL_SHARE = 0.95  # of the cores: crowded, even if no waiting is reported
SPARE_SHARE = 0.75  # of the cores: below it there is room for more
LOWERING_FACTOR = 0.75  # factor by which the limit is lowered
FIRST_PER_CORE = 2  # attempts for each core at the start
LEAST_FIRST = 4


class CpuUse(Record, frozen=True):
    """Cumulative measurements at one moment, in seconds."""

    at: float
    used: float  # CPU time of the run's workers and sandboxes
    stalled: float  # time in which some task waited


class CpuLimit(msgspec.Struct):
    """The limit on concurrent attempts. Pure: it gets measurements."""

    cores: float
    most: int = 0
    crowded: bool = False
    _before: CpuUse | None = None
    _lowered: float = -SETTLING_SECONDS
    _learned: bool = False  # the limit was lowered once, and grows slowly since

    def __post_init__(self) -> None:
        self.most = self.most or max(LEAST_FIRST, math.ceil(FIRST_PER_CORE * self.cores))

    def update(self, now: CpuUse, running: int, waiting: bool) -> bool:
        """Update the limit; return whether it changed. `waiting`: attempts wait for this limit."""
        if self._before is None:
            self._before = now
        if (seconds := now.at - self._before.at) < WINDOW_SECONDS:
            return False
        busy = (now.used - self._before.used) / seconds / self.cores
        stalled = (now.stalled - self._before.stalled) / seconds
        self._before = now
        self.crowded = busy > FULL_SHARE or (stalled > STALLED_SHARE and busy > BUSY_SHARE)
        before = self.most
        if self.crowded:
            self._lower(now.at, running)
        elif waiting and busy < SPARE_SHARE:
            self.most += max(1, self.most // (8 if self._learned else 2))
        return self.most != before

    def _lower(self, now: float, running: int) -> None:
        """Lower the limit, at most once per settling time.

        Attempts beyond the limit have to end before it is lowered further.
        """
        least = max(2, math.ceil(self.cores))
        if now < self._lowered + SETTLING_SECONDS or running > self.most or running <= least:
            return
        self.most = max(least, int(min(self.most, running) * LOWERING_FACTOR))
        self._lowered, self._learned = now, True


class CpuWatch:
    """The CPU limit of one run, where `--concurrency` is `auto`."""

    def __init__(self, slots: int) -> None:
        self._limit = CpuLimit(count_cores())
        self._slots = slots
        self._sandboxes = 0.0  # seconds that all sandboxes have used
        self._before: dict[int, float] = {}  # attempt -> seconds; bound: the run's concurrency
        self._waited = 0.0  # seconds that some task waited, where the kernel reports only run queues
        self._queued = read_queued()
        self._at = self._looked = time.monotonic()

    @property
    def most(self) -> int:
        return min(self._slots, self._limit.most)

    def look(self, census: FleetCensus, running: int, waiting: bool) -> str:
        """Return a description of the new limit; empty if it is unchanged."""
        before, now = self.most, time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return ""
        self._looked = now
        cpu = {attempt: use.cpu for attempt, use in census.uses.items()}
        self._sandboxes += sum(max(0.0, told - self._before.get(a, 0.0)) for a, told in cpu.items())
        self._before = cpu
        used = self._sandboxes + read_used((os.getpid(), *census.pids))
        stalled = read_stalled()
        use = CpuUse(at=now, used=used, stalled=self._estimate_stall(now) if stalled is None else stalled)
        if not self._limit.update(use, running, waiting) or self.most == before:
            return ""
        why = "tasks wait for the CPU" if self._limit.crowded else "there is CPU to spare"
        return f"{self.most} attempts at once, before: {before}: {why}"

    def _estimate_stall(self, now: float) -> float:
        """Without pressure data, estimate the stall from the share of time that tasks are queued."""
        queued, seconds = read_queued(), now - self._at
        if queued is not None and self._queued is not None:
            ran, waited = queued[0] - self._queued[0], queued[1] - self._queued[1]
            self._waited += seconds * waited / (ran + waited) if ran + waited > 0 else 0.0
        self._queued, self._at = queued, now
        return self._waited


def count_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores that this process may use, by its affinity and the quotas of its control groups."""
    quotas = (_read_quota(group) for group in OwnCgroups(proc, cgroups).cpu_directories)
    return min([float(len(os.sched_getaffinity(0))), *(quota for quota in quotas if quota)])


def read_stalled(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the seconds so far in which a task waited for CPU: in our own group, else on the machine."""
    own = OwnCgroups(proc, cgroups).own_unified
    told = _read_total(own / "cpu.pressure") if own else None
    return _read_total(proc / "pressure/cpu") if told is None else told


def read_queued(proc: Path = Path("/proc")) -> tuple[float, float] | None:
    """Return the seconds so far that all tasks of the machine ran, and that they waited in run queues."""
    rows = [line.split() for line in read_text(proc / "schedstat").splitlines() if line.startswith("cpu")]
    if not rows or any(len(row) < 9 for row in rows):
        return None
    return sum(int(row[7]) for row in rows) / 1e9, sum(int(row[8]) for row in rows) / 1e9


def read_used(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Return the CPU seconds that these processes have used, without their children."""
    return sum(_read_cpu_seconds(proc / str(pid) / "stat") for pid in pids)


def _read_quota(group: Path) -> float | None:
    """Return the quota of a group in cores, if any: version 2 has one file for it, version 1 two."""
    told = read_text(group / "cpu.max").split()
    if len(told) == 2 and told[0].isdecimal():
        return int(told[0]) / int(told[1])
    quota, period = read_number(group / "cpu.cfs_quota_us"), read_number(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _read_total(path: Path) -> float | None:
    for line in read_text(path).splitlines():
        kind, *fields = line.split()
        for field in fields:
            if kind == "some" and field.startswith("total="):
                return int(field.removeprefix("total=")) / 1e6
    return None


def _read_cpu_seconds(stat: Path) -> float:
    fields = read_text(stat).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS if len(fields) > 12 else 0.0
