"""Control groups: where this process may make one, one for each attempt, and what the kernel says of it.

Version 1 (memory and pids apart) and version 2. Whoever may make none gets rlimits instead: see `process.py`.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import blake3

from ..core.errors import SandboxFailed
from ..core.records import Record
from . import marks

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


class CgroupHome(Record, frozen=True):
    """Where groups can be made; empty where they cannot."""

    kind: str  # `v1`, `v2`, `none`
    memory: str = ""
    pids: str = ""
    why: str = ""  # why not

    @property
    def usable(self) -> bool:
        return bool(self.memory)


class Cgroup:
    """The group of one attempt."""

    def __init__(self, home: CgroupHome, name: str) -> None:
        self._v2 = home.kind == "v2"
        self._memory = Path(home.memory, name)
        self.directories = list(
            dict.fromkeys([self._memory, *([Path(home.pids, name)] if home.pids else [])])
        )

    @classmethod
    def make(cls, home: CgroupHome, name: str, memory: int | None, pids: int | None) -> Cgroup:
        group = cls(home, name)
        try:
            for directory in group.directories:
                directory.mkdir(exist_ok=True)
            group._limit(memory, pids)
        except OSError as e:
            group.remove()
            raise SandboxFailed(f"cannot make a control group: {e}") from e
        return group

    @property
    def entrances(self) -> list[Path]:
        """The files that a process writes itself into."""
        return [directory / "cgroup.procs" for directory in self.directories]

    def processes(self) -> set[int]:
        found: set[int] = set()
        for entrance in self.entrances:
            found |= {int(pid) for pid in _read(entrance).split()}
        return found - {0, os.getpid()}

    def oom_kills(self) -> int:
        """How many processes the kernel killed at this group's memory limit so far."""
        return _field(self._memory / ("memory.events" if self._v2 else "memory.oom_control"), "oom_kill")

    def use(self) -> int:
        """Bytes of memory in use, without the page cache."""
        names = ("anon", "shmem") if self._v2 else ("total_rss", "total_shmem")
        return sum(_field(self._memory / "memory.stat", name) for name in names)

    def allow(self, memory: int) -> None:
        """Raise the limit on memory."""
        try:
            if not self._v2 and (self._memory / "memory.memsw.limit_in_bytes").exists():
                self._set("memory.memsw.limit_in_bytes", memory)  # never below the other
            self._set("memory.max" if self._v2 else "memory.limit_in_bytes", memory)
        except OSError:
            return  # it keeps what it has

    def peak(self) -> int:
        text = _read(self._memory / ("memory.peak" if self._v2 else "memory.max_usage_in_bytes")).strip()
        return int(text) if text.isdigit() else 0

    def kill(self) -> int:
        """Kill all that is in it, once; how many there were."""
        found = self.processes()
        if found and self._v2 and (self._memory / "cgroup.kill").exists():
            (self._memory / "cgroup.kill").write_text("1")
        else:
            marks.end(found, signal.SIGKILL)
        return len(found)

    def remove(self) -> bool:
        """Remove it if it is empty; whether it is gone."""
        left = [directory for directory in self.directories if not remove(directory)]
        return not left

    def _limit(self, memory: int | None, pids: int | None) -> None:
        if memory is not None:
            if self._v2:
                self._set("memory.max", memory)
                self._set_where_present("memory.swap.max", 0)
                self._set_where_present("memory.oom.group", 1)
            else:
                self._set("memory.limit_in_bytes", memory)
                self._set_where_present("memory.memsw.limit_in_bytes", memory)
        if pids is not None:
            for directory in self.directories:
                if (directory / "pids.max").exists():
                    (directory / "pids.max").write_text(str(pids))

    def _set(self, name: str, value: int) -> None:
        (self._memory / name).write_text(str(value))

    def _set_where_present(self, name: str, value: int) -> None:
        if (self._memory / name).exists():
            self._set(name, value)


def prefix(run: str) -> str:
    """What the names of a run's groups begin with; a run's id may hold what a path may not."""
    return f"holdwater-{blake3.blake3(run.encode()).hexdigest(16)}-"


def left_by(run: str, root: Path = ROOT) -> list[Path]:
    """The groups of a run, wherever its processes had been started."""
    wanted = prefix(run)
    found = [
        Path(top, d) for top, directories, _ in os.walk(root) for d in directories if d.startswith(wanted)
    ]
    return sorted(found, reverse=True)


def remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as e:
        if e.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def locate(root: Path = ROOT, proc: Path = PROC) -> CgroupHome:
    """Where this process may make groups below its own, so that its own limits go on holding for them."""
    groups = own_groups(proc)
    if "memory" in groups:
        return _locate_v1(root, groups)
    if "" in groups and (root / "cgroup.controllers").exists():
        return _locate_v2(root, groups[""])
    return CgroupHome(kind="none", why="no memory controller is mounted")


def own_groups(proc: Path = PROC) -> dict[str, str]:
    """Controller -> the path of this process's group; version 2 has the empty name."""
    found = {}
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _locate_v1(root: Path, groups: dict[str, str]) -> CgroupHome:
    memory = _own_directory(root / "memory", groups["memory"])
    if why := _why_not(memory, "memory.limit_in_bytes"):
        return CgroupHome(kind="v1", why=why)
    pids = _own_directory(root / "pids", groups.get("pids", "/"))
    return CgroupHome(kind="v1", memory=str(memory), pids="" if _why_not(pids, "pids.max") else str(pids))


def _locate_v2(root: Path, own: str) -> CgroupHome:
    """In version 2 a group with processes hands on no controllers: go up, but never past a limit."""
    why = ""
    for group in _upwards(root, _own_directory(root, own)):
        why = _why_not(group, "memory.max")
        if not why:
            return CgroupHome(kind="v2", memory=str(group), pids=str(group))
        if _read(group / "memory.max").strip() not in ("", "max"):
            break
    return CgroupHome(kind="v2", why=why)


def _own_directory(root: Path, own: str) -> Path:
    """In a container the hierarchy may be mounted from its own group, and the path be the host's."""
    directory = root / own.lstrip("/")
    return directory if ".." not in directory.parts and directory.is_dir() else root


def _upwards(root: Path, group: Path) -> Iterator[Path]:
    while group != root:
        yield group
        group = group.parent
    yield root


def _why_not(parent: Path, needed: str) -> str:
    """Why no group with the file `needed` can be made in `parent`; empty if it can."""
    trial = parent / f"holdwater-probe-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError as e:
        return f"cannot make a group in `{parent}`: {e.strerror}"
    try:
        if not (trial / needed).exists():
            return f"a group in `{parent}` gets no `{needed}`"
        if not os.access(trial / "cgroup.procs", os.W_OK):
            return f"cannot enter a group in `{parent}`"
    finally:
        trial.rmdir()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # gone, or not given to us: the same as nothing in it


def _field(path: Path, name: str) -> int:
    for line in _read(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
