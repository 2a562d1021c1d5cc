"""Enforces a container's limits: extends `sandbox/watch.py` with the measurements of a container.

Usage is read from the container's control group if this process can see it; otherwise the daemon is queried,
less often. Disk usage is the daemon's count.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from ...core.errors import LimitReached, ResourceExhausted
from ...core.records import Limits
from ...docker.client import DockerError
from ...kernel_files import read_cgroup_paths
from .. import resource_usage
from ..cgroup import PROC, ROOT, CgroupHome, ControlGroup
from ..watch import OWN_PROCESSES, KernelCounts, LimitWatch, format_size, make_cpu_error
from .container import REQUEST_TIMEOUT, AttemptContainer

STATS = 5.0  # seconds between queries to a daemon whose control groups are not visible from here


class ContainerWatch(LimitWatch):
    """Watches the resources of one container and reports exceeded limits."""

    def __init__(self, limits: Limits, threads: Executor) -> None:
        super().__init__("", limits, threads, lambda commands: [])
        self._container: AttemptContainer | None = None
        self._earlier = KernelCounts()  # of groups that are gone
        self._services = 0  # processes started by the image's entrypoint
        self._stats: dict[str, Any] = {}  # the daemon's last reply, if there is no group

    def begin(self, container: AttemptContainer, root: str) -> None:
        """Begin to watch a running container; `root` is the daemon's data directory, if visible from here."""
        self._container, self._directory = container, root
        self.group = find_group(container.pid, container.id)
        self._services = max(0, super().population() - OWN_PROCESSES)

    def population(self) -> int:
        """Return the number of processes of commands."""
        return max(0, super().population() - self._services)

    def before_restart(self) -> None:
        """Save the counters before a restart: then the container has a new group of the same name."""
        self._earlier = self.read_counts()

    def end(self) -> None:
        """Stop watching, as the container is about to be removed; the next one starts without any usage."""
        self.leave_group()
        self._container, self._earlier, self._stats = None, KernelCounts(), {}
        self._cpu_before = 0.0
        self.disk = self.memory = 0

    def allow(self, memory: int) -> None:
        self._note_limit(memory)  # the daemon sets the limit

    def read_counts(self) -> KernelCounts:
        now, earlier = super().read_counts(), self._earlier
        return KernelCounts(now.oom_kills + earlier.oom_kills, now.pids_hits + earlier.pids_hits)

    async def blame_unseen(self, since: float) -> ResourceExhausted | None:
        """Return an error if the kernel killed a process since then, where only the daemon knows."""
        container, limit = self._container, self.limits.memory_limit
        if self.group or container is None or limit is None:
            return None
        told = await container.events("oom", since)
        return ResourceExhausted(f"killed at {format_size(limit)}: sandbox memory") if told else None

    def check_cpu(self) -> LimitReached | None:
        most = self.limits.cpu_seconds
        if self.group or most is None:
            return super().check_cpu()
        used = self._stats.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0) / 1e9
        return make_cpu_error(most) if used > most else None

    async def measure_disk(self) -> None:
        container = self._container
        if container is None:
            return
        free, started = resource_usage.read_free_bytes(self._directory), time.monotonic()
        try:
            told = await container.client.get(
                f"{container.path}/json", {"size": "true"}, seconds=REQUEST_TIMEOUT
            )
        except DockerError:
            return  # the running command, or the next one, reports the error
        used = (told.get("SizeRw") or 0) + await self._in_thread(
            lambda: sum(map(resource_usage.count_bytes, container.volumes))
        )
        for pace in (self._pace, self._urgent_pace):
            pace.record_cost(time.monotonic(), time.monotonic() - started)
        self._free, self.disk = free, used
        self.peak_disk = max(self.peak_disk, used)

    async def _follow_tree(self) -> None:
        """Query the daemon periodically."""
        while True:
            await asyncio.sleep(STATS)
            if self._container is None:
                continue
            try:
                query = {"stream": "false", "one-shot": "true"}
                self._stats = await self._container.client.get(
                    f"{self._container.path}/stats", query, seconds=REQUEST_TIMEOUT
                )
            except DockerError:
                continue
            memory = self._stats.get("memory_stats", {})
            kept = memory.get("stats", {})
            cache = kept.get("total_inactive_file", kept.get("inactive_file", 0))
            self.memory = max(0, memory.get("usage", 0) - cache)
            self._peak = max(self._peak, self.memory)
            self._stop(self.check_cpu())


def find_group(pid: int, container: str, proc: Path = PROC, root: Path = ROOT) -> ControlGroup | None:
    """Return the control group of a container, if this process can read it."""
    groups = read_cgroup_paths(proc / str(pid))
    paths = {controller: path for controller, path in groups.items() if container in path}
    if not container or not paths:
        return None  # pid of an unrelated process: the daemon is on another machine
    home = _locate_home(paths, root)
    group = ControlGroup(home, Path(next(iter(paths.values()))).name, cpu=True) if home else None
    return group if group and all(directory.is_dir() for directory in group.directories) else None


def _locate_home(paths: dict[str, str], root: Path) -> CgroupHome | None:
    if "memory" in paths:
        found = {name: str((root / name / path.lstrip("/")).parent) for name, path in paths.items()}
        return CgroupHome(
            kind="v1",
            memory=found["memory"],
            pids=found.get("pids", ""),
            cpu=found.get("cpu", ""),
            cpuacct=found.get("cpuacct", ""),
        )
    if "" in paths:
        place = str((root / paths[""].lstrip("/")).parent)
        return CgroupHome(kind="v2", memory=place, pids=place, cpu=place, cpuacct=place)
    return None
