"""Keeps a container to its limits: what `sandbox/watch.py` does, with a container's own ways to measure.

The kernel's figures are read from the container's control group where this process sees it; the daemon is
asked otherwise, more seldom. The disk is what the daemon counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import LimitReached, ResourceExhausted
from ...core.records import Limits
from ...docker.client import DockerError
from .. import quota
from ..cgroup import PROC, ROOT, Cgroup, CgroupHome
from ..watch import OWN, Counts, Watch, size
from .container import ASKING, Container

STATS = 5.0  # seconds between questions to a daemon whose control groups are not seen from here


class ContainerWatch(Watch):
    """What one container uses, and whether it may."""

    def __init__(self, limits: Limits, threads: Executor) -> None:
        super().__init__("", limits, threads, lambda commands: [])
        self._container: Container | None = None
        self._earlier = Counts()  # of groups that are gone
        self._services = 0  # processes that the image's entrypoint has started
        self._told: dict[str, Any] = {}  # the daemon's last answer, where there is no group

    def begin(self, container: Container, root: str) -> None:
        """The container runs; `root` is where the daemon keeps what it writes, if that is seen from here."""
        self._container, self._directory = container, root
        self.group = group_of(container.pid, container.id)
        self._services = max(0, super().population() - OWN)

    def population(self) -> int:
        """Processes of commands."""
        return max(0, super().population() - self._services)

    def restarting(self) -> None:
        """All in the container is about to end; its group will be another, of the same name."""
        self._earlier = self.counts()

    def end(self) -> None:
        """The container is about to be removed: the next one begins with nothing but the work, if any."""
        self.leave_group()
        self._container, self._earlier, self._told = None, Counts(), {}
        self._cpu_before = 0.0
        self.disk = self.memory = 0

    def allow(self, memory: int) -> None:
        name = "memory" if self.limits.memory else "lease"
        self.limits = msgspec.structs.replace(self.limits, **{name: memory})
        if self.group:
            self._raised_from = self.group.memory_limit()

    def counts(self) -> Counts:
        now, earlier = super().counts(), self._earlier
        return Counts(now.oom_kills + earlier.oom_kills, now.pids_hits + earlier.pids_hits)

    async def blame_unseen(self, since: float) -> ResourceExhausted | None:
        """Whether the kernel killed something in it since then, where only the daemon can tell."""
        container, limit = self._container, self.limits.held_to
        if self.group or container is None or limit is None:
            return None
        told = await container.events("oom", since)
        return ResourceExhausted(f"killed at {size(limit)}: sandbox memory") if told else None

    def cpu_over(self) -> LimitReached | None:
        most = self.limits.cpu_seconds
        if self.group or most is None:
            return super().cpu_over()
        used = self._told.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage", 0) / 1e9
        return (
            LimitReached(f"killed after {most:g} s of CPU: sandbox CPU", kind="cpu") if used > most else None
        )

    async def measure_disk(self) -> None:
        container = self._container
        if container is None:
            return
        free, started = quota.free(self._directory), time.monotonic()
        try:
            told = await container.client.get(f"{container.path}/json", {"size": "true"}, seconds=ASKING)
        except DockerError:
            return  # the command that runs, or the next one, will tell
        used = (told.get("SizeRw") or 0) + await self._in_thread(_volumes, container.volumes)
        for pace in (self._pace, self._hurry):
            pace.ended(time.monotonic(), time.monotonic() - started)
        self._free, self.disk = free, used
        self.peak_disk = max(self.peak_disk, used)

    async def _follow_tree(self) -> None:
        """Ask the daemon, now and then."""
        while True:
            await asyncio.sleep(STATS)
            if self._container is None:
                continue
            try:
                query = {"stream": "false", "one-shot": "true"}
                self._told = await self._container.client.get(
                    f"{self._container.path}/stats", query, seconds=ASKING
                )
            except DockerError:
                continue
            memory = self._told.get("memory_stats", {})
            kept = memory.get("stats", {})
            cache = kept.get("total_inactive_file", kept.get("inactive_file", 0))
            self.memory = max(0, memory.get("usage", 0) - cache)
            self._peak = max(self._peak, self.memory)
            self._stop(self.cpu_over())


def group_of(pid: int, container: str, proc: Path = PROC, root: Path = ROOT) -> Cgroup | None:
    """The control group of a container, where this process can read it."""
    try:
        rows = [line.split(":", 2) for line in (proc / str(pid) / "cgroup").read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path for _, names, path in rows for name in names.split(",") if container in path}
    if not container or not paths:
        return None  # another process: the daemon is on another machine
    home = _home(paths, root)
    group = Cgroup(home, Path(next(iter(paths.values()))).name, cpu=True) if home else None
    return group if group and all(directory.is_dir() for directory in group.directories) else None


def _home(paths: dict[str, str], root: Path) -> CgroupHome | None:
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


def _volumes(places: Sequence[str]) -> int:
    return sum(quota.used(place) for place in places)
