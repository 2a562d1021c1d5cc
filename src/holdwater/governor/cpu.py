"""Reads the available CPU cores, the CPU time of processes and the time that tasks waited for CPU.

It keeps no state and decides nothing: `cpu_limit.py` does. The roots are arguments, as in `meter.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .cgroups import OwnCgroups
from .kernel_files import read_number, read_text

TICKS = os.sysconf("SC_CLK_TCK")


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
