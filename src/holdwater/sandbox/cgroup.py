"""Control groups: finds where this process may create them, creates one per attempt, and reads its counters.

Supports version 1 (separate controllers) and version 2. Where no group can be created, `launcher.py` sets
rlimits.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import blake3

from ..core.errors import SandboxFailed
from ..core.records import Record
from ..kernel_files import find_row, read_cgroup_paths, read_number, read_text
from . import process_marks

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
OURS = "holdwater-"
PERIOD = 100_000  # microseconds of one CPU quota period
SLACK = 1.25  # lowest limit that is set, as a multiple of the memory in use
UNLIMITED = 1 << 62  # version 1 reports a number beyond this for "no limit"


class CgroupHome(Record, frozen=True):
    """The directories in which groups can be created; empty strings where they cannot."""

    kind: str  # `v1`, `v2`, `none`
    memory: str = ""
    pids: str = ""
    cpu: str = ""  # for a CPU quota
    cpuacct: str = ""  # for counting CPU time
    why: str = ""  # reason if no group can be created

    @property
    def usable(self) -> bool:
        return bool(self.memory)


class ControlGroup:
    """The control group of one attempt."""

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
    ) -> ControlGroup:
        """Create a group with these limits; with `cpu` it has its own fair share and counts CPU time."""
        group = cls(home, name, cpu)
        try:
            for directory in group.directories:
                directory.mkdir(exist_ok=True)
            group._limit(memory, pids)
            group._limit_cpu(cpus)
        except OSError as e:
            group.remove()
            raise SandboxFailed(f"cannot create a control group: {e}") from e
        return group

    @property
    def limits_pids(self) -> bool:
        return self._pids is not None

    @property
    def counts_cpu(self) -> bool:
        return self._cpuacct is not None

    @property
    def procs_files(self) -> list[Path]:
        """The files to which a process writes its pid to enter the group."""
        return [directory / "cgroup.procs" for directory in self.directories]

    def processes(self) -> set[int]:
        found: set[int] = set()
        for entrance in self.procs_files:
            found |= {int(pid) for pid in read_text(entrance).split()}
        return found - {0, os.getpid()}

    def oom_kills(self) -> int:
        """Return how many processes the kernel has killed at this group's memory limit so far."""
        events = self._memory / ("memory.events" if self._v2 else "memory.oom_control")
        return find_row(read_text(events), "oom_kill")

    def pids_hits(self) -> int:
        """Return how often a fork failed because the group was at its limit of processes."""
        return find_row(read_text(self._pids / "pids.events"), "max") if self._pids else 0

    def population(self) -> int:
        """Return the number of processes and threads in the group."""
        return (read_number(self._pids / "pids.current") or 0) if self._pids else len(self.processes())

    def cpu_seconds(self) -> float:
        """Return the CPU time used so far."""
        if self._cpuacct is None:
            return 0.0
        if self._v2:
            return find_row(read_text(self._cpuacct / "cpu.stat"), "usage_usec") / 1e6
        return (read_number(self._cpuacct / "cpuacct.usage") or 0) / 1e9

    def memory_in_use(self) -> int:
        """Return the bytes of memory in use, without the page cache."""
        names = ("anon", "shmem") if self._v2 else ("total_rss", "total_shmem")
        stat = read_text(self._memory / "memory.stat")
        return sum(find_row(stat, name) for name in names)

    def charged_memory(self) -> int:
        """Return the bytes in use with the page cache: a single number, which is cheap to read."""
        try:
            fd = os.open(self._usage, os.O_RDONLY)  # read five times a second: at most three system calls
        except OSError:
            return 0
        try:
            return int(os.read(fd, 32))
        finally:
            os.close(fd)

    def memory_limit(self) -> int | None:
        """Return the memory limit that the kernel enforces now."""
        limit = read_number(self._memory / ("memory.max" if self._v2 else "memory.limit_in_bytes")) or 0
        return limit if 0 < limit < UNLIMITED else None

    def allow(self, memory: int) -> None:
        """Change the memory limit, but never to a value at which the memory in use would be killed."""
        names = ["memory.max"] if self._v2 else ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
        if memory > (self.memory_limit() or UNLIMITED):
            names.reverse()  # in version 1 the second limit is never below the first
        else:
            memory = max(memory, int(self.memory_in_use() * SLACK))
        try:
            for name in names:
                self._set_where_present(name, memory)
        except OSError:
            return  # the group keeps its limit

    def peak(self) -> int:
        """Return the peak memory, page cache included."""
        return read_number(self._memory / ("memory.peak" if self._v2 else "memory.max_usage_in_bytes")) or 0

    def kill(self) -> int:
        """Send one kill to all processes and forbid new ones; return how many processes there were."""
        found = self.processes()
        if found and self._v2 and (self._memory / "cgroup.kill").exists():
            (self._memory / "cgroup.kill").write_text("1")
        else:
            for directory in self.directories:
                forbid_forks(directory)
            process_marks.signal_pids(found, signal.SIGKILL)
        return len(found)

    def end_all(self, seconds: float, pids: int | None) -> bool:
        """Kill until the group is empty; return False if `seconds` pass. The group stays usable. Blocks."""
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
        """Remove the group if it is empty; return whether it is gone."""
        left = [directory for directory in self.directories if not remove_group(directory)]
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
        quota = max(1000, int(cpus * PERIOD))  # the kernel accepts no less
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


def group_prefix(run: str) -> str:
    """Return the prefix of a run's group names: a hash, as a run's id may be invalid in a path."""
    return f"{OURS}{blake3.blake3(run.encode()).hexdigest(16)}-"


def find_leftovers(run: str, root: Path = ROOT) -> list[Path]:
    """Return the groups of a run, wherever its processes were started."""
    wanted = group_prefix(run)
    found = (group for group in _walk_groups(str(root)) if group.rpartition("/")[2].startswith(wanted))
    return [Path(group) for group in sorted(found, reverse=True)]


def _walk_groups(place: str) -> Iterator[str]:
    """Yield all directories below `place`. A group has many files: one without groups in it is not listed."""
    try:
        with os.scandir(place) as entries:
            groups = [
                (entry.path, entry.stat(follow_symlinks=False).st_nlink)
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return  # it was removed meanwhile
    for group, links in groups:
        yield group
        if links != 2:
            yield from _walk_groups(group)


def remove_group(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError as e:
        if e.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def forbid_forks(directory: Path) -> None:
    """Forbid forks in a group that limits pids: then even a process that forks without end can be killed."""
    try:
        with (directory / "pids.max").open("r+") as file:
            file.write("0")
    except OSError:
        return  # another controller's directory, or already gone


def locate_home(root: Path = ROOT, proc: Path = PROC) -> CgroupHome:
    """Find where this process may create groups below its own, so that its own limits still apply to them."""
    groups = read_cgroup_paths(proc / "self")
    if "memory" in groups:
        return _locate_v1(root, groups)
    if "" in groups and (root / "cgroup.controllers").exists():
        return _locate_v2(root, groups[""])
    return CgroupHome(kind="none", why="no memory controller is mounted")


def _locate_v1(root: Path, groups: dict[str, str]) -> CgroupHome:
    memory = _find_own_directory(root / "memory", groups["memory"])
    if why := _why_not(memory, "memory.limit_in_bytes"):
        return CgroupHome(kind="v1", why=why)

    def locate_controller(controller: str, needed: str) -> str:
        directory = _find_own_directory(root / controller, groups.get(controller, "/"))
        return "" if _why_not(directory, needed) else os.path.realpath(directory)  # may be a shared hierarchy

    return CgroupHome(
        kind="v1",
        memory=str(memory),
        pids=locate_controller("pids", "pids.max"),
        cpu=locate_controller("cpu", "cpu.cfs_quota_us"),
        cpuacct=locate_controller("cpuacct", "cpuacct.usage"),
    )


def _locate_v2(root: Path, own: str) -> CgroupHome:
    """Go up, but not past a limit: in version 2 a group with processes gives its children no controllers."""
    why = ""
    for group in _walk_upwards(root, _find_own_directory(root, own)):
        why = _why_not(group, "memory.max")
        if not why:
            place = str(group)
            pids = "" if _why_not(group, "pids.max") else place
            cpu = "" if _why_not(group, "cpu.max") else place
            return CgroupHome(kind="v2", memory=place, pids=pids, cpu=cpu, cpuacct=place)
        if read_text(group / "memory.max").strip() not in ("", "max"):
            break
    return CgroupHome(kind="v2", why=why)


def _find_own_directory(root: Path, own: str) -> Path:
    """Return the directory of this process's group.

    In a container the hierarchy may be mounted from the container's own group while the path is the host's:
    then it is `root`. For a worker in a group created for it alone, it is the parent of that group.
    """
    directory = root / own.lstrip("/")
    if ".." in directory.parts or not directory.is_dir():
        return root
    while directory != root and directory.name.startswith(OURS):
        directory = directory.parent
    return directory


def _walk_upwards(root: Path, group: Path) -> Iterator[Path]:
    while group != root:
        yield group
        group = group.parent
    yield root


def _why_not(parent: Path, needed: str) -> str:
    """Return why no group with the file `needed` can be created in `parent`; empty if it can."""
    trial = parent / f"{OURS}probe-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError as e:
        return f"cannot create a group in `{parent}`: {e.strerror}"
    try:
        if not (trial / needed).exists():
            return f"a group in `{parent}` gets no `{needed}`"
        if not os.access(trial / "cgroup.procs", os.W_OK):
            return f"cannot enter a group in `{parent}`"
    finally:
        trial.rmdir()
    return ""
