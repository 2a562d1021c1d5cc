"""Reads what a run may use of memory and disk, and what counts against it, whoever sets the limit.

It holds nothing and decides nothing. The roots are arguments: any tree of files can stand in for the kernel.
What single processes use is in `processes.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .cgroups import Groups, machine_pressure
from .disks import read_disks
from .kernel import table
from .processes import PAGE
from .reading import Bound, Reading


class Meter:
    """Reads for a run that writes to `places`, such as `run`, `scratch` and `temp`.

    `budget` is what it is given, `request` what its pod is sure to get: above it a pod can be evicted.
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

    def read(self, own: int) -> Reading:
        """One reading; `own` are the bytes that this run's processes use together."""
        groups = self.groups()
        bounds = [*self._given(groups, own), self._available(own)]
        pressure = groups.pressure()
        return Reading(
            bounds=tuple(sorted(bounds, key=lambda bound: bound.room)),
            disks=read_disks(self._places, self._proc),
            pressure=machine_pressure(self._proc) if pressure is None else pressure,
            oom_kills=groups.oom_kills(),
        )

    def limit(self) -> Bound:
        """The smallest limit that is set for us anywhere, however much of it others use now."""
        return min([*self._given(self.groups(), 0), self._installed()], key=lambda bound: bound.limit)

    def groups(self) -> Groups:
        return Groups(self._proc, self._cgroups)

    def _given(self, groups: Groups, own: int) -> list[Bound]:
        bounds = list(groups.bounds(own))
        if self._budget is not None:
            bounds.append(Bound("budget", self._budget, own, "`--memory`"))
        if self._request is not None:
            used = groups.working_set(own)
            bounds.append(Bound("pod", self._request, used, "the pod's request"))
        return bounds

    def _available(self, own: int) -> Bound:
        """What others on the machine use is not ours: the limit moves with them."""
        available = self._memory("MemAvailable", "SC_AVPHYS_PAGES")
        return Bound("machine", own + available, own, "available beside its other tenants")

    def _installed(self) -> Bound:
        total = self._memory("MemTotal", "SC_PHYS_PAGES")
        used = max(0, total - self._memory("MemAvailable", "SC_AVPHYS_PAGES"))
        return Bound("machine", total, used, "all that is installed")

    def _memory(self, row: str, otherwise: str) -> int:
        told = table(self._proc / "meminfo").get(row)
        return os.sysconf(otherwise) * PAGE if told is None else told * 1024
