"""Ends and removes what a killed run left: processes, control groups and directories.

Called at the next start, when the run's lock is held and none of its sandboxes can be alive. Directories of
other runs are `scratch.py`'s.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

from ..core.records import Record
from . import cgroup, marks
from .probe import probe
from .remove import remove_tree
from .scratch import empty

SECONDS = 5.0


class Swept(Record, frozen=True):
    """How much was left."""

    processes: int = 0
    directories: int = 0
    cgroups: int = 0


def sweep(run: str, place: Path) -> Swept:
    """Kill every process that carries the mark of `run`; remove its groups and its sandboxes. Blocks."""
    processes = marks.kill_all({marks.RUN: run}, SECONDS)
    groups = cgroup.left_by(run)
    processes += sum(_empty(group) for group in groups)
    return Swept(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=empty(place),
    )


def sweep_attempts(run: str, place: Path, attempts: Iterable[int]) -> Swept:
    """The same for single attempts of a run that goes on: their worker is dead. Blocks."""
    home, found = probe().cgroup, list(attempts)
    processes = sum(marks.kill_all({marks.RUN: run, marks.ATTEMPT: str(n)}, SECONDS) for n in found)
    names = [f"{cgroup.prefix(run)}{number}" for number in found] if home.usable else []
    groups = [
        group for name in names for group in cgroup.Cgroup(home, name, cpu=True).directories if group.exists()
    ]
    processes += sum(_empty(group) for group in groups)
    directories = [place / str(number) for number in found if (place / str(number)).exists()]
    return Swept(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=sum(not remove_tree(directory) for directory in directories),
    )


def _empty(group: Path) -> int:
    """Kill those that hid their marks; how many there were."""
    until = time.monotonic() + SECONDS
    cgroup.close(group)
    killed: set[int] = set()
    while not cgroup.remove(group) and time.monotonic() < until:
        found = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        marks.end(found, signal.SIGKILL)
        killed |= found
        time.sleep(marks.LOOK_AGAIN)
    return len(killed)
