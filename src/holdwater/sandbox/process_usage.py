"""Measures the resources of a process tree without a control group: reads `/proc`, keeps nothing open.

`process_marks.py` finds the processes of a tree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SHARES = ("Pss_Anon", "Pss_Shmem")


def sum_resident(pids: Iterable[int]) -> int:
    """Return the bytes of memory without file mappings; pages shared after a fork count for each process."""
    return sum(map(_read_resident, pids))


def sum_proportional(pids: Iterable[int]) -> int:
    """Return the same with shared pages counted once: exact, but some hundred times as expensive."""
    return sum(map(_read_proportional, pids))


def sum_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time used so far by processes and their ended children."""
    return sum(map(_read_cpu_seconds, pids))


def count_tasks(user: int) -> int:
    """Return the number of a user's processes and threads, as `RLIMIT_NPROC` counts them."""
    return sum(_count_tasks(entry, user) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _read_resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0  # the process is gone
    return (int(fields[1]) - int(fields[2])) * PAGE


def _read_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # the process is gone
    return sum(map(int, fields[11:15])) / TICKS


def _read_proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _read_resident(pid)
    rows = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    return sum(int(rows.get(name, "0 kB").split()[0]) * 1024 for name in SHARES)


def _count_tasks(process: Path, user: int) -> int:
    try:
        return len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
    except OSError:
        return 0
