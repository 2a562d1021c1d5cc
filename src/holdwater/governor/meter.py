"""Reads what processes use and what they may use: memory from /proc and control groups, disk from statvfs.

It holds nothing and decides nothing. The roots are arguments: any tree of files can stand in for the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..core.records import Record

PAGE = os.sysconf("SC_PAGE_SIZE")
UNLIMITED = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page


class Limit(Record, frozen=True):
    """The most memory that this process and its children may use, and who says so."""

    bytes: int
    source: str


class Reading(Record, frozen=True):
    """One reading, in bytes."""

    memory: int
    memory_limit: int  # what is available to others on the machine is not ours: it moves with them
    disk_free: int
    disk_total: int


class Meter:
    """Reads for a run that lives in `directory`."""

    def __init__(
        self, directory: Path, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._directory = directory
        self._proc = proc
        self._cgroups = cgroups

    def read(self, pids: Sequence[int], pss: bool = False) -> Reading:
        """What `pids` use together; a process that has gone uses nothing."""
        use = self._pss if pss else self._rss
        memory = sum(use(pid) for pid in pids)
        disk = os.statvfs(self._directory)
        return Reading(
            memory=memory,
            memory_limit=min(self.limit().bytes, memory + self._machine("MemAvailable")),
            disk_free=disk.f_bavail * disk.f_frsize,
            disk_total=disk.f_blocks * disk.f_frsize,
        )

    def limit(self) -> Limit:
        """The smallest limit that is set for us anywhere."""
        machine = Limit(bytes=self._machine("MemTotal"), source="the machine's memory")
        return min([machine, *self._limits()], key=lambda limit: limit.bytes)

    def _rss(self, pid: int) -> int:
        fields = _read(self._proc / str(pid) / "statm").split()
        return int(fields[1]) * PAGE if fields else 0

    def _pss(self, pid: int) -> int:
        """Shared pages by their share; 1 ms for each process, so not for every second."""
        return _field(self._proc / str(pid) / "smaps_rollup", "Pss:") * 1024

    def _machine(self, name: str) -> int:
        return _field(self._proc / "meminfo", f"{name}:") * 1024

    def _limits(self) -> Iterator[Limit]:
        for line in _read(self._proc / "self/cgroup").splitlines():
            _, controllers, own = line.split(":", 2)
            if not controllers:
                yield from self._limits_v2(own)
            elif "memory" in controllers.split(","):
                yield from self._limits_v1(own)

    def _limits_v2(self, own: str) -> Iterator[Limit]:
        for group in _upwards(self._cgroups, own):
            for name in ("memory.max", "memory.high"):
                yield from _limit(group / name)

    def _limits_v1(self, own: str) -> Iterator[Limit]:
        root = self._cgroups / "memory"
        for group in _upwards(root, own):
            yield from _limit(group / "memory.limit_in_bytes")
        # The groups above a container's own are out of sight; the kernel tells their smallest limit here.
        innermost = next(iter(_upwards(root, own)))
        told = _field(innermost / "memory.stat", "hierarchical_memory_limit")
        if 0 < told < UNLIMITED:
            yield Limit(bytes=told, source=f"`hierarchical_memory_limit` of `{innermost}`")


def _upwards(root: Path, own: str) -> Iterator[Path]:
    """The groups from a process's own to the outermost in sight."""
    group = root / own.lstrip("/")
    if ".." in group.parts or not group.is_dir():
        group = root  # in a container the path may be the host's
    while group != root:
        yield group
        group = group.parent
    yield root


def _limit(path: Path) -> Iterator[Limit]:
    text = _read(path).strip()
    if text.isdigit() and int(text) < UNLIMITED:
        yield Limit(bytes=int(text), source=f"`{path}`")


def _field(path: Path, name: str) -> int:
    """The number after `name` in a file of names and numbers; 0 if there is none."""
    for line in _read(path).splitlines():
        words = line.split()
        if words and words[0] == name:
            return int(words[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # gone, or not ours to see: says nothing
