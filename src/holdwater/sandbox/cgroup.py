"""Control groups: where this process may make one, one for each attempt, and what the kernel says of it.

Version 1 (each controller apart) and version 2. Whoever may make none gets rlimits: see `entrance.py`.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import blake3

from ..core.errors import SandboxFailed
from ..core.records import Record
from . import marks

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
OURS = "holdwater-"
PERIOD = 100_000  # microseconds over which a quota of CPU is kept
SLACK = 1.25  # times what a group uses: a lower limit than this is not set
UNLIMITED = 1 << 62  # version 1 says so with a number beyond this


class CgroupHome(Record, frozen=True):
    """Where groups can be made; empty where they cannot."""

    kind: str  # `v1`, `v2`, `none`
    memory: str = ""
    pids: str = ""
    cpu: str = ""  # where a quota of CPU can be set
    cpuacct: str = ""  # where CPU time is counted
    why: str = ""  # why not

    @property
    def usable(self) -> bool:
        return bool(self.memory)


class Cgroup:
    """The group of one attempt."""

    def __init__(self, home: CgroupHome, name: str, cpu: bool = False) -> None:
        self._v2 = home.kind == "v2"
        self._memory = Path(home.memory, name)
        self._usage = str(self._memory / ("memory.current" if self._v2 else "memory.usage_in_bytes"))
        self._pids = Path(home.pids, name) if home.pids else None
        self._cpu = Path(home.cpu, name) if home.cpu and cpu else None
        self._cpuacct = Path(home.cpuacct, name) if home.cpuacct and cpu else None
        places = (self._memory, self._pids, self._cpu, self._cpuacct)
        self.directories = list(dict.fromkeys(place for place in places if place))

    @classmethod
    def make(
        cls,
        home: CgroupHome,
        name: str,
        memory: int | None,
        pids: int | None,
        cpus: float | None = None,
        cpu: bool = False,
    ) -> Cgroup:
        """A group with these limits; with `cpu` it also has a fair share of its own and counts CPU time."""
        group = cls(home, name, cpu)
        try:
            for directory in group.directories:
                directory.mkdir(exist_ok=True)
            group._limit(memory, pids)
            group._limit_cpu(cpus)
        except OSError as e:
            group.remove()
            raise SandboxFailed(f"cannot make a control group: {e}") from e
        return group

    @property
    def limits_pids(self) -> bool:
        return self._pids is not None

    @property
    def counts_cpu(self) -> bool:
        return self._cpuacct is not None

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

    def pids_hits(self) -> int:
        """How often a process could not be made because there were as many as there may be."""
        return _field(self._pids / "pids.events", "max") if self._pids else 0

    def population(self) -> int:
        """How many processes and threads are in it."""
        return _number(self._pids / "pids.current") if self._pids else len(self.processes())

    def cpu_seconds(self) -> float:
        """CPU time that it has used so far."""
        if self._cpuacct is None:
            return 0.0
        if self._v2:
            return _field(self._cpuacct / "cpu.stat", "usage_usec") / 1e6
        return _number(self._cpuacct / "cpuacct.usage") / 1e9

    def use(self) -> int:
        """Bytes of memory in use, without the page cache."""
        names = ("anon", "shmem") if self._v2 else ("total_rss", "total_shmem")
        return sum(_fields(self._memory / "memory.stat", names))

    def usage(self) -> int:
        """The same with the page cache: one number, which is cheap to ask for."""
        try:
            fd = os.open(self._usage, os.O_RDONLY)  # asked five times a second: no more than three calls
        except OSError:
            return 0
        try:
            return int(os.read(fd, 32))
        finally:
            os.close(fd)

    def memory_limit(self) -> int | None:
        """The limit on memory that the kernel holds it to now."""
        limit = _number(self._memory / ("memory.max" if self._v2 else "memory.limit_in_bytes"))
        return limit if 0 < limit < UNLIMITED else None

    def allow(self, memory: int) -> None:
        """Change the limit on memory. It is not lowered to where what it uses now would be killed."""
        names = ["memory.max"] if self._v2 else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        if memory > (self.memory_limit() or UNLIMITED):
            names.reverse()  # in version 1 the second is never below the first
        else:
            memory = max(memory, int(self.use() * SLACK))
        try:
            for name in names:
                self._set_where_present(name, memory)
        except OSError:
            return  # it keeps what it has

    def peak(self) -> int:
        """The most memory at once, page cache included."""
        return _number(self._memory / ("memory.peak" if self._v2 else "memory.max_usage_in_bytes"))

    def kill(self) -> int:
        """Kill all that is in it, once, and let no new one come; how many there were."""
        found = self.processes()
        if found and self._v2 and (self._memory / "cgroup.kill").exists():
            (self._memory / "cgroup.kill").write_text("1")
        else:
            for directory in self.directories:
                close(directory)
            marks.end(found, signal.SIGKILL)
        return len(found)

    def end_all(self, seconds: float, pids: int | None) -> bool:
        """Kill until nothing is in it; whether that took at most `seconds`. It stays usable. Blocks."""
        if not self.processes():
            return True
        until = time.monotonic() + seconds
        while self.kill():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        if self._pids and (self._pids / "pids.max").exists():
            (self._pids / "pids.max").write_text("max" if pids is None else str(pids))
        return True

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
        if pids is not None and self._pids and (self._pids / "pids.max").exists():
            (self._pids / "pids.max").write_text(str(pids))

    def _limit_cpu(self, cpus: float | None) -> None:
        if cpus is None or self._cpu is None:
            return
        quota = max(1000, int(cpus * PERIOD))  # the kernel takes no less
        if self._v2:
            (self._cpu / "cpu.max").write_text(f"{quota} {PERIOD}")
        else:
            (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD))
            (self._cpu / "cpu.cfs_quota_us").write_text(str(quota))

    def _set(self, name: str, value: int) -> None:
        (self._memory / name).write_text(str(value))

    def _set_where_present(self, name: str, value: int) -> None:
        if (self._memory / name).exists():
            self._set(name, value)


def prefix(run: str) -> str:
    """What the names of a run's groups begin with; a run's id may hold what a path may not."""
    return f"{OURS}{blake3.blake3(run.encode()).hexdigest(16)}-"


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


def close(directory: Path) -> None:
    """Let no process in it make another, where it limits their number: what forks is then killed for good."""
    try:
        with (directory / "pids.max").open("r+") as file:
            file.write("0")
    except OSError:
        return  # another controller's, or gone


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

    def found(controller: str, needed: str) -> str:
        directory = _own_directory(root / controller, groups.get(controller, "/"))
        return "" if _why_not(directory, needed) else os.path.realpath(directory)  # some share a hierarchy

    return CgroupHome(
        kind="v1",
        memory=str(memory),
        pids=found("pids", "pids.max"),
        cpu=found("cpu", "cpu.cfs_quota_us"),
        cpuacct=found("cpuacct", "cpuacct.usage"),
    )


def _locate_v2(root: Path, own: str) -> CgroupHome:
    """In version 2 a group with processes hands on no controllers: go up, but never past a limit."""
    why = ""
    for group in _upwards(root, _own_directory(root, own)):
        why = _why_not(group, "memory.max")
        if not why:
            place = str(group)
            pids = "" if _why_not(group, "pids.max") else place
            cpu = "" if _why_not(group, "cpu.max") else place
            return CgroupHome(kind="v2", memory=place, pids=pids, cpu=cpu, cpuacct=place)
        if _read(group / "memory.max").strip() not in ("", "max"):
            break
    return CgroupHome(kind="v2", why=why)


def _own_directory(root: Path, own: str) -> Path:
    """In a container the hierarchy may be mounted from its own group, and the path be the host's.

    A worker may be in a group that was made for it alone: then it is the one around that.
    """
    directory = root / own.lstrip("/")
    if ".." in directory.parts or not directory.is_dir():
        return root
    while directory != root and directory.name.startswith(OURS):
        directory = directory.parent
    return directory


def _upwards(root: Path, group: Path) -> Iterator[Path]:
    while group != root:
        yield group
        group = group.parent
    yield root


def _why_not(parent: Path, needed: str) -> str:
    """Why no group with the file `needed` can be made in `parent`; empty if it can."""
    trial = parent / f"{OURS}probe-{os.getpid()}"
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
    """Some of these are read five times a second: no more calls than it takes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""  # gone, or not given to us: the same as nothing in it
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b"")).decode()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(path: Path) -> int:
    text = _read(path).strip()
    return int(text) if text.isdigit() else 0


def _field(path: Path, name: str) -> int:
    return sum(_fields(path, (name,)))


def _fields(path: Path, names: Collection[str]) -> list[int]:
    rows = (line.partition(" ") for line in _read(path).splitlines())
    return [int(value) for name, _, value in rows if name in names]
