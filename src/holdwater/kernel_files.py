"""Reads small kernel files below `/proc` and `/sys`: as text and numbers, and as the memory of processes.

A missing or unreadable file yields an empty value: that is not an error, and no number is invented for it. A
process that has ended counts as 0. The callers interpret the values; they know which processes belong to a
run.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")


def read_text(path: Path) -> str:
    """Read a file with as few system calls as possible: some are read five times a second."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.fsdecode(b"".join(iter(lambda: os.read(fd, 1 << 16), b"")))
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_number(path: Path) -> int | None:
    """Return the single number in a file; None for `max` or an empty file."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_table(path: Path) -> dict[str, int]:
    """Return the rows of a file with a name and a number on each line: `anon 4096`, `MemTotal:  16 kB`."""
    rows = (line.split() for line in read_text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def find_row(table: str, name: str) -> int:
    """Return the number in one row of such a file's text, or 0: it costs less than the whole table."""
    _, found, rest = f"\n{table}".partition(f"\n{name} ")
    return int(rest.partition("\n")[0]) if found else 0


def read_cgroup_paths(process: Path = Path("/proc/self")) -> dict[str, str]:
    """Return controller -> path of a process's control group; version 2 has the empty name."""
    rows = [line.split(":", 2) for line in read_text(process / "cgroup").splitlines()]
    return {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(",")}


def read_resident(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """Return the resident bytes of each process; shared pages count fully for each."""
    return {pid: _read_statm(pid, proc) for pid in pids}


def read_pss(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """Return the bytes of each process, with shared pages divided among their users.

    It takes 1 ms for each process, so it is too slow for every second. If the kernel hides the share, as
    for another user's process, all pages count as unshared.
    """
    told = {pid: read_table(proc / str(pid) / "smaps_rollup").get("Pss") for pid in pids}
    return {pid: _read_statm(pid, proc) if share is None else share * 1024 for pid, share in told.items()}


def read_tree_memory(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """Return the resident bytes of each process with all descendants, in one pass over all processes.

    A child whose parent has ended belongs to no tree. A caller that must not miss it uses a control group.
    """
    resident: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (fields := _read_stat(entry / "stat")):
            pid = int(entry.name)
            children[int(fields[1])].append(pid)
            resident[pid] = int(fields[21]) * PAGE
    return {pid: sum(resident.get(member, 0) for member in _collect_tree(pid, children)) for pid in pids}


def list_children(pid: int, proc: Path = PROC) -> set[int]:
    """Return the live processes that any thread of `pid` has started."""
    told = (read_text(path) for path in (proc / str(pid) / "task").glob("*/children"))
    return {int(child) for line in told for child in line.split()}


def _read_statm(pid: int, proc: Path) -> int:
    fields = read_text(proc / str(pid) / "statm").split()
    return int(fields[1]) * PAGE if len(fields) > 1 else 0


def _read_stat(path: Path) -> list[str]:
    """Return the fields from the third on: the second is a name, which may contain any character."""
    fields = read_text(path).rpartition(")")[2].split()
    return fields if len(fields) > 21 else []


def _collect_tree(pid: int, children: dict[int, list[int]]) -> set[int]:
    found = {pid}
    ahead = [pid]
    while ahead:
        new = [child for child in children.get(ahead.pop(), ()) if child not in found]
        found.update(new)
        ahead += new
    return found
