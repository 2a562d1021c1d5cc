"""Reads what a run may use of the CPU, what its processes have used, and how long tasks had to wait for it.

It holds nothing and decides nothing: `crowding.py` does. The roots are arguments, as in `meter.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .cgroups import Groups
from .kernel import number, text

TICKS = os.sysconf("SC_CLK_TCK")


def count_cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Cores that this process may use: by its affinity, and by the quotas of its control groups."""
    quotas = (_quota(group) for group in Groups(proc, cgroups).cpu_directories)
    return min([float(len(os.sched_getaffinity(0))), *(quota for quota in quotas if quota)])


def read_stalled(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Seconds so far in which a task waited for the CPU: of our own group, else of the machine."""
    own = Groups(proc, cgroups).own_unified
    told = _some_total(own / "cpu.pressure") if own else None
    return _some_total(proc / "pressure/cpu") if told is None else told


def read_queued(proc: Path = Path("/proc")) -> tuple[float, float] | None:
    """Seconds so far that all tasks of the machine ran, and that they waited in run queues for that."""
    rows = [line.split() for line in text(proc / "schedstat").splitlines() if line.startswith("cpu")]
    if not rows or any(len(row) < 9 for row in rows):
        return None
    return sum(int(row[7]) for row in rows) / 1e9, sum(int(row[8]) for row in rows) / 1e9


def read_used(pids: Iterable[int], proc: Path = Path("/proc")) -> float:
    """Seconds of CPU that these processes have used themselves."""
    return sum(_used(proc / str(pid) / "stat") for pid in pids)


def _quota(group: Path) -> float | None:
    """Cores, where a group has a quota: version 2 in one file, version 1 in two."""
    told = text(group / "cpu.max").split()
    if len(told) == 2 and told[0].isdecimal():
        return int(told[0]) / int(told[1])
    quota, period = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _some_total(path: Path) -> float | None:
    for line in text(path).splitlines():
        kind, *fields = line.split()
        for field in fields:
            if kind == "some" and field.startswith("total="):
                return int(field.removeprefix("total=")) / 1e6
    return None


def _used(stat: Path) -> float:
    fields = text(stat).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS if len(fields) > 12 else 0.0
