"""What a process tree uses, where no control group says it: read from `/proc`, with nothing kept open.

Which processes a tree has is `marks.py`'s part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SHARES = ("Pss_Anon", "Pss_Shmem")


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory without what is mapped from files; what a fork shares is counted for each."""
    return sum(map(_resident, pids))


def proportional(pids: Iterable[int]) -> int:
    """The same with each shared page counted once: exact, and some hundred times as dear."""
    return sum(map(_proportional, pids))


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that processes, and children of theirs that have ended, have used so far."""
    return sum(map(_cpu_seconds, pids))


def tasks_of(user: int) -> int:
    """How many processes and threads a user has, as `RLIMIT_NPROC` counts them."""
    return sum(_tasks(entry, user) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0  # it is gone
    return (int(fields[1]) - int(fields[2])) * PAGE


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # it is gone
    return sum(map(int, fields[11:15])) / TICKS


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _resident(pid)
    rows = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    return sum(int(rows.get(name, "0 kB").split()[0]) * 1024 for name in SHARES)


def _tasks(process: Path, user: int) -> int:
    try:
        return len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
    except OSError:
        return 0
