"""Reads the memory and disk limits of a run from all sources, and the use that counts against them.

It keeps no state and decides nothing. The roots are arguments, so that any tree of files can replace the
kernel's. `kernel_files.py` reads the use of single processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..kernel_files import PAGE, read_table
from .cgroups import OwnCgroups, read_machine_pressure
from .disks import read_disks
from .resource_reading import ResourceBound, ResourceReading


class ResourceMeter:
    """Takes readings for a run that writes to `places`, such as `run`, `scratch` and `temp`.

    `budget` is the run's memory budget, `request` the memory request of its pod: a pod above it can be
    evicted.
    """

    def __init__(
        self,
        places: Mapping[str, Path],
        budget: int | None = None,
        request: int | None = None,
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
    ) -> None:
        self._places = dict(places)
        self._budget = budget
        self._request = request
        self._proc = proc
        self._cgroups = cgroups

    def change_budget(self, budget: int | None) -> None:
        self._budget = budget

    def read(self, own: int) -> ResourceReading:
        """Take one reading; `own` is the total memory of this run's processes in bytes."""
        groups = self.groups()
        bounds = [*self._read_limits(groups, own), self._read_available(own)]
        pressure = groups.pressure()
        return ResourceReading(
            bounds=tuple(sorted(bounds, key=lambda bound: bound.room)),
            disks=read_disks(self._places, self._proc),
            pressure=read_machine_pressure(self._proc) if pressure is None else pressure,
            oom_kills=groups.oom_kills(),
        )

    def limit(self) -> ResourceBound:
        """Return the smallest limit that applies to us, regardless of its use by others."""
        return min(
            [*self._read_limits(self.groups(), 0), self._read_installed()], key=lambda bound: bound.limit
        )

    def groups(self) -> OwnCgroups:
        return OwnCgroups(self._proc, self._cgroups)

    def _read_limits(self, groups: OwnCgroups, own: int) -> list[ResourceBound]:
        bounds = list(groups.bounds(own))
        if self._budget is not None:
            bounds.append(ResourceBound("budget", self._budget, own, "`--memory`"))
        if self._request is not None:
            used = groups.working_set(own)
            bounds.append(ResourceBound("pod", self._request, used, "the pod's request"))
        return bounds

    def _read_available(self, own: int) -> ResourceBound:
        """Return a bound that moves with the memory use of other processes on the machine."""
        available = self._read_meminfo("MemAvailable", "SC_AVPHYS_PAGES")
        return ResourceBound("machine", own + available, own, "available beside its other tenants")

    def _read_installed(self) -> ResourceBound:
        total = self._read_meminfo("MemTotal", "SC_PHYS_PAGES")
        used = max(0, total - self._read_meminfo("MemAvailable", "SC_AVPHYS_PAGES"))
        return ResourceBound("machine", total, used, "all that is installed")

    def _read_meminfo(self, row: str, otherwise: str) -> int:
        told = read_table(self._proc / "meminfo").get(row)
        return os.sysconf(otherwise) * PAGE if told is None else told * 1024
