"""The control groups that this process is in: limits on memory, what counts against them, pressure, kills.

Version 1, version 2 and both side by side, on the host or from inside a container. It only reads: `sandbox/`
makes groups. Nothing is kept between two readings, so a limit that changes, or a move, is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..core.records import Record
from .kernel import number, table, text
from .reading import Bound

UNLIMITED = 1 << 62  # version 1 writes "no limit" as the largest multiple of a page


class Words(Record, frozen=True):
    """What a version calls its files, and the rows of `memory.stat` that include the groups below."""

    version: int
    limits: tuple[str, ...]
    usage: str
    anon: str
    shmem: str
    inactive: str
    kills: tuple[str, ...]  # the first that is there


V1 = Words(
    version=1,
    limits=("memory.limit_in_bytes",),
    usage="memory.usage_in_bytes",
    anon="total_rss",
    shmem="total_shmem",
    inactive="total_inactive_file",
    kills=("memory.oom_control",),
)
V2 = Words(
    version=2,
    limits=("memory.max", "memory.high"),
    usage="memory.current",
    anon="anon",
    shmem="shmem",
    inactive="inactive_file",
    kills=("memory.events.local", "memory.events"),
)


class Limit(Record, frozen=True):
    bytes: int
    source: str


class Group:
    """One memory group."""

    def __init__(self, directory: Path, words: Words) -> None:
        self.directory = directory
        self._words = words

    def limit(self) -> Limit | None:
        """The smallest that is set on this group itself."""
        paths = (self.directory / name for name in self._words.limits)
        told = [Limit(found, f"`{path}`") for path in paths if (found := number(path)) is not None]
        smallest = min(told, key=lambda limit: limit.bytes, default=None)
        return smallest if smallest and smallest.bytes < UNLIMITED else None

    def smallest_above(self) -> Limit | None:
        """In version 1 the kernel tells the smallest limit of a group and all above it, in sight or not."""
        told = self._stat().get("hierarchical_memory_limit", UNLIMITED)
        source = f"`hierarchical_memory_limit` in `{self.directory / 'memory.stat'}`"
        return Limit(told, source) if told < UNLIMITED else None

    def used(self) -> int | None:
        """What cannot be dropped in need: page cache is not use. None where nothing is told."""
        stat = self._stat()
        if self._words.anon in stat:
            return stat[self._words.anon] + stat.get(self._words.shmem, 0)
        return self._usage()

    def working_set(self) -> int | None:
        """What a kubelet evicts by."""
        usage = self._usage()
        return None if usage is None else max(0, usage - self._stat().get(self._words.inactive, 0))

    def oom_kills(self) -> int:
        told = (table(self.directory / name) for name in self._words.kills)
        return next((rows["oom_kill"] for rows in told if "oom_kill" in rows), 0)

    @property
    def whole_machine(self) -> bool:
        """The root of all groups. A container's own root is a group like others."""
        return (self.directory / "release_agent").exists() or self._usage() is None

    def _usage(self) -> int | None:
        return number(self.directory / self._words.usage)

    def _stat(self) -> dict[str, int]:
        return table(self.directory / "memory.stat")


class Groups:
    """The memory groups of this process: its own first, up to the outermost in sight."""

    def __init__(self, proc: Path, cgroups: Path) -> None:
        paths = _own_paths(proc)
        both = not (cgroups / "cgroup.controllers").exists() and (cgroups / "unified").is_dir()
        unified = cgroups / "unified" if both else cgroups
        self.own_unified = next(_upwards(unified, paths[""])) if "" in paths else None
        self.cpu_directories = list(_upwards(cgroups / "cpu", paths["cpu"])) if "cpu" in paths else []
        if not self.cpu_directories and "" in paths:
            self.cpu_directories = list(_upwards(unified, paths[""]))
        self.version = 0  # there are none
        self._groups: list[Group] = []
        if "memory" in paths:
            self._found(V1, cgroups / "memory", paths["memory"])
        elif "" in paths:
            self._found(V2, unified, paths[""])

    @property
    def own(self) -> Group | None:
        return self._groups[0] if self._groups else None

    def bounds(self, own: int) -> Iterator[Bound]:
        """One for each group with a limit. `own` stands in for a use that is not told."""
        for group, limit in self._limits():
            used = group.used()
            yield Bound("container", limit.bytes, own if used is None else used, limit.source)

    def working_set(self, own: int) -> int:
        """Of the outermost group in sight that is not the machine's: in a container, the container's."""
        inside = (group for group in reversed(self._groups) if not group.whole_machine)
        told = next((group.working_set() for group in inside), None)
        return own if told is None else told

    def oom_kills(self) -> int:
        return self.own.oom_kills() if self.own else 0

    def pressure(self) -> float | None:
        """Of our own group. The kernel tells it in version 2 alone, even without a memory controller."""
        return _some_avg10(self.own_unified / "memory.pressure") if self.own_unified else None

    def _found(self, words: Words, root: Path, path: str) -> None:
        self.version = words.version
        self._groups = [Group(directory, words) for directory in _upwards(root, path)]

    def _limits(self) -> Iterator[tuple[Group, Limit]]:
        limits = [(group, limit) for group in self._groups if (limit := group.limit())]
        smallest = self.own.smallest_above() if self.own and self.version == 1 else None
        if smallest is None:
            yield from limits
            return
        # What is smaller than the smallest is set on a group above that does not count its children.
        yield from ((group, limit) for group, limit in limits if limit.bytes >= smallest.bytes)
        if all(limit.bytes != smallest.bytes for _, limit in limits):
            yield self._groups[-1], smallest


def machine_pressure(proc: Path) -> float | None:
    return _some_avg10(proc / "pressure/memory")


def _own_paths(proc: Path) -> dict[str, str]:
    """Controller -> the path of this process's group; version 2 has the empty name."""
    rows = [line.split(":", 2) for line in text(proc / "self/cgroup").splitlines()]
    return {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(",")}


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The groups from a process's own to the outermost in sight."""
    group = _in_sight(root, path)
    while group != root:
        yield group
        group = group.parent
    yield root


def _in_sight(root: Path, path: str) -> Path:
    """In a container the path may begin with groups of the host, which are out of sight there."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        return root
    candidates = (root.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((group for group in candidates if group.is_dir()), root)


def _some_avg10(path: Path) -> float | None:
    for line in text(path).splitlines():
        kind, *fields = line.split()
        for field in fields:
            if kind == "some" and field.startswith("avg10="):
                return float(field.removeprefix("avg10="))
    return None
