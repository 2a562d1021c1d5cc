"""Reads the control groups of this process: memory limits, memory use, pressure and OOM kills.

It supports version 1, version 2 and both side by side, on the host and inside a container. It only reads:
`sandbox/` creates groups. No state is kept between readings, so changed limits and moved processes are
followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..core.records import Record
from ..kernel_files import read_cgroup_paths, read_number, read_table, read_text
from .resource_reading import ResourceBound

UNLIMITED = 1 << 62  # version 1 writes "no limit" as the largest multiple of the page size


class CgroupFiles(Record, frozen=True):
    """The file names of a version, and its rows of `memory.stat` that include child groups."""

    version: int
    limits: tuple[str, ...]
    usage: str
    anon: str
    shmem: str
    inactive: str
    kills: tuple[str, ...]  # the first existing file is used


V1 = CgroupFiles(
    version=1,
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    anon="total_rss",
    shmem="total_shmem",
    inactive="total_inactive_file",
    kills=("memory.oom_control",),
)
V2 = CgroupFiles(
    version=2,
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    anon="anon",
    shmem="shmem",
    inactive="inactive_file",
    kills=("memory.events.local", "memory.events"),
)


class MemoryLimit(Record, frozen=True):
    bytes: int
    source: str


class MemoryCgroup:
    """One memory group."""

    def __init__(self, directory: Path, words: CgroupFiles) -> None:
        self.directory = directory
        self._files = words

    def limit(self) -> MemoryLimit | None:
        """Return the smallest limit that is set on this group itself."""
        paths = (self.directory / name for name in self._files.limits)
        told = [MemoryLimit(found, f"`{path}`") for path in paths if (found := read_number(path)) is not None]
        smallest = min(told, key=lambda limit: limit.bytes, default=None)
        return smallest if smallest and smallest.bytes < UNLIMITED else None

    def smallest_above(self) -> MemoryLimit | None:
        """Return the smallest limit of this group and all its ancestors, visible or not (version 1 only)."""
        told = self._stat().get("hierarchical_memory_limit", UNLIMITED)
        source = f"`hierarchical_memory_limit` in `{self.directory / 'memory.stat'}`"
        return MemoryLimit(told, source) if told < UNLIMITED else None

    def read_used(self) -> int | None:
        """Return the bytes that cannot be reclaimed, so without page cache; None if unknown."""
        stat = self._stat()
        if self._files.anon in stat:
            return stat[self._files.anon] + stat.get(self._files.shmem, 0)
        return self._usage()

    def working_set(self) -> int | None:
        """Return the bytes by which a kubelet decides on eviction."""
        usage = self._usage()
        return None if usage is None else max(0, usage - self._stat().get(self._files.inactive, 0))

    def oom_kills(self) -> int:
        told = (read_table(self.directory / name) for name in self._files.kills)
        return next((rows["oom_kill"] for rows in told if "oom_kill" in rows), 0)

    @property
    def whole_machine(self) -> bool:
        """Whether this is the root of all groups. The root inside a container is an ordinary group."""
        return (self.directory / "release_agent").exists() or self._usage() is None

    def _usage(self) -> int | None:
        return read_number(self.directory / self._files.usage)

    def _stat(self) -> dict[str, int]:
        return read_table(self.directory / "memory.stat")


class OwnCgroups:
    """The memory groups of this process, from its own to the outermost visible one."""

    def __init__(self, proc: Path, cgroups: Path) -> None:
        paths = read_cgroup_paths(proc / "self")
        both = not (cgroups / "cgroup.controllers").exists() and (cgroups / "unified").is_dir()
        unified = cgroups / "unified" if both else cgroups
        self.own_unified = next(_walk_up(unified, paths[""])) if "" in paths else None
        self.cpu_directories = list(_walk_up(cgroups / "cpu", paths["cpu"])) if "cpu" in paths else []
        if not self.cpu_directories and "" in paths:
            self.cpu_directories = list(_walk_up(unified, paths[""]))
        self.version = 0  # 0: there are no memory groups
        self._groups: list[MemoryCgroup] = []
        if "memory" in paths:
            self._add_groups(V1, cgroups / "memory", paths["memory"])
        elif "" in paths:
            self._add_groups(V2, unified, paths[""])

    @property
    def own(self) -> MemoryCgroup | None:
        return self._groups[0] if self._groups else None

    def bounds(self, own: int) -> Iterator[ResourceBound]:
        """Yield one bound for each group with a limit. `own` replaces an unknown use."""
        for group, limit in self._limits():
            used = group.read_used()
            yield ResourceBound("container", limit.bytes, own if used is None else used, limit.source)

    def working_set(self, own: int) -> int:
        """Return the working set of the outermost visible group below the machine's root.

        In a container that is the group of the container.
        """
        inside = (group for group in reversed(self._groups) if not group.whole_machine)
        told = next((group.working_set() for group in inside), None)
        return own if told is None else told

    def oom_kills(self) -> int:
        return self.own.oom_kills() if self.own else 0

    def pressure(self) -> float | None:
        """Return the pressure of our own group.

        Only version 2 reports it, even without a memory controller.
        """
        return _read_avg10(self.own_unified / "memory.pressure") if self.own_unified else None

    def _add_groups(self, words: CgroupFiles, root: Path, path: str) -> None:
        self.version = words.version
        self._groups = [MemoryCgroup(directory, words) for directory in _walk_up(root, path)]

    def _limits(self) -> Iterator[tuple[MemoryCgroup, MemoryLimit]]:
        limits = [(group, limit) for group in self._groups if (limit := group.limit())]
        smallest = self.own.smallest_above() if self.own and self.version == 1 else None
        if smallest is None:
            yield from limits
            return
        # A limit below the smallest is set on a group above that does not count its children.
        yield from ((group, limit) for group, limit in limits if limit.bytes >= smallest.bytes)
        if all(limit.bytes != smallest.bytes for _, limit in limits):
            yield self._groups[-1], smallest


def read_machine_pressure(proc: Path) -> float | None:
    return _read_avg10(proc / "pressure/memory")


def _walk_up(root: Path, path: str) -> Iterator[Path]:
    """Yield the groups from a process's own to the outermost visible one."""
    group = _find_visible(root, path)
    while group != root:
        yield group
        group = group.parent
    yield root


def _find_visible(root: Path, path: str) -> Path:
    """Return the visible part of `path`: in a container it may begin with groups of the host."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return root
    candidates = (root.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((group for group in candidates if group.is_dir()), root)


def _read_avg10(path: Path) -> float | None:
    for line in read_text(path).splitlines():
        kind, *fields = line.split()
        for field in fields:
            if kind == "some" and field.startswith("avg10="):
                return float(field.removeprefix("avg10="))
    return None
