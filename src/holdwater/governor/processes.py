"""What processes use, from /proc: resident memory, also of whole trees, and the proportional share of it.

A process that has gone uses nothing. Who belongs to a run is for the caller to know.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from .kernel import table, text

PAGE = os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")


def use_of(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """The resident bytes of each; pages that several share count for each of them."""
    return {pid: _resident(pid, proc) for pid in pids}


def pss_of(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """The same with shared pages by their share; 1 ms a process, so not for every second.

    What the kernel does not tell, such as of another user's process, is taken for not shared.
    """
    told = {pid: table(proc / str(pid) / "smaps_rollup").get("Pss") for pid in pids}
    return {pid: _resident(pid, proc) if share is None else share * 1024 for pid, share in told.items()}


def use_of_trees(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """The resident bytes of each with all its descendants, in one pass over all processes.

    A child whose parent has gone belongs to no tree any more: whoever must not miss it uses a control group.
    """
    resident: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdecimal() and (fields := _stat(entry / "stat")):
            pid = int(entry.name)
            children[int(fields[1])].append(pid)
            resident[pid] = int(fields[21]) * PAGE
    return {pid: sum(resident.get(member, 0) for member in _tree(pid, children)) for pid in pids}


def children_of(pid: int, proc: Path = PROC) -> set[int]:
    """The processes that any thread of `pid` has started, and that are not gone."""
    told = (text(path) for path in (proc / str(pid) / "task").glob("*/children"))
    return {int(child) for line in told for child in line.split()}


def _resident(pid: int, proc: Path) -> int:
    fields = text(proc / str(pid) / "statm").split()
    return int(fields[1]) * PAGE if len(fields) > 1 else 0


def _stat(path: Path) -> list[str]:
    """The fields from the third on: the second is a name, in which any character can be."""
    fields = text(path).rpartition(")")[2].split()
    return fields if len(fields) > 21 else []


def _tree(pid: int, children: dict[int, list[int]]) -> set[int]:
    found = {pid}
    ahead = [pid]
    while ahead:
        new = [child for child in children.get(ahead.pop(), ()) if child not in found]
        found.update(new)
        ahead += new
    return found
