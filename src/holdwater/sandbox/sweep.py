"""Ends and removes the processes, control groups and directories that a killed run left.

It runs at the next start, when the run's lock is held and none of its sandboxes can be alive. `scratch.py`
removes directories of other runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from pathlib import Path

from ..core.records import Record
from . import cgroup, process_marks
from .probe import probe
from .scratch import remove_sandboxes
from .tree_removal import remove_tree

SECONDS = 5.0


class SweepReport(Record, frozen=True):
    """The number of leftovers that were removed."""

    processes: int = 0
    directories: int = 0
    cgroups: int = 0


def sweep(run: str, place: Path) -> SweepReport:
    """Kill every process with the mark of `run`; remove its groups and its sandboxes. Blocks."""
    processes = process_marks.kill_all({process_marks.RUN: run}, SECONDS)
    groups = cgroup.find_leftovers(run)
    processes += sum(_empty_group(group) for group in groups)
    return SweepReport(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=remove_sandboxes(place),
    )


def sweep_attempts(run: str, place: Path, attempts: Iterable[int]) -> SweepReport:
    """Sweep single attempts of a run that goes on, whose worker is dead. Blocks."""
    home, found = probe().cgroup, list(attempts)
    processes = sum(
        process_marks.kill_all({process_marks.RUN: run, process_marks.ATTEMPT: str(n)}, SECONDS)
        for n in found
    )
    names = [f"{cgroup.group_prefix(run)}{number}" for number in found] if home.usable else []
    groups = [
        group
        for name in names
        for group in cgroup.ControlGroup(home, name, cpu=True).directories
        if group.exists()
    ]
    processes += sum(_empty_group(group) for group in groups)
    directories = [place / str(number) for number in found if (place / str(number)).exists()]
    return SweepReport(
        processes=processes,
        cgroups=sum(not group.exists() for group in groups),
        directories=sum(not remove_tree(directory) for directory in directories),
    )


def _empty_group(group: Path) -> int:
    """Kill processes that hid their marks and remove the group; return how many were killed."""
    until = time.monotonic() + SECONDS
    cgroup.forbid_forks(group)
    killed: set[int] = set()
    while not cgroup.remove_group(group) and time.monotonic() < until:
        found = {int(pid) for pid in (group / "cgroup.procs").read_text().split()}
        process_marks.signal_pids(found, signal.SIGKILL)
        killed |= found
        time.sleep(process_marks.LOOK_AGAIN)
    return len(killed)
