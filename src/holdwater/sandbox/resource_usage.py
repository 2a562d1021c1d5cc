"""Measures what a sandbox uses: bytes of its directory on disk, memory and CPU time of its process tree.

It also paces the measurements, and enforces no limit: `watch.py` does. It keeps no list of files, so a tree
of millions costs no memory. `process_marks.py` finds the processes of a tree.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from .confined_paths import LIST, LONGEST_PATH, change_mode, open_beneath, open_parent

BLOCK = 512  # bytes: the unit of `st_blocks` on every file system
MOST_LEVELS = 64  # directories open at once, each `LONGEST_PATH` further down

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")
SHARES = ("Pss_Anon", "Pss_Shmem")


class DiskUsage(msgspec.Struct, frozen=True):
    used: int  # bytes
    cost: float  # seconds of CPU
    too_deep: bool = False  # part of it is deeper than measured and may take any number of bytes


def read_free_bytes(directory: str) -> int:
    """Return the free bytes of the directory's file system; 0 if they cannot be read."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bfree * space.f_frsize


def read_space(directory: str) -> tuple[int, int] | None:
    """Return (available, total) bytes of the directory's file system; None if it does not report them."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return None
    return (space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize) if space.f_blocks else None


def measure(directory: str, pids: Iterable[int] = ()) -> DiskUsage:
    """Measure a sandbox's `directory`, with deleted files that `pids` still hold open. Blocks."""
    started = time.thread_time()
    _unlock(directory)
    total, too_deep = _measure(directory, pids)
    return DiskUsage(total, time.thread_time() - started, too_deep)


def _unlock(directory: str) -> None:
    """Make the subdirectories listable: an agent must not hide files by locking a directory."""
    try:
        with open_parent(directory, []) as parent, os.scandir(directory) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) and mode & 0o500 != 0o500:
                    change_mode(entry.name, parent, stat.S_IMODE(mode) | 0o700)
    except OSError:
        return  # not created yet, or being removed; invisible files do not count


def count_bytes(directory: str, pids: Iterable[int] = ()) -> int:
    """Return the bytes on disk; files that are invisible, or vanish meanwhile, do not count."""
    return _measure(directory, pids)[0]


def _measure(directory: str, pids: Iterable[int]) -> tuple[int, bool]:
    """Return the same, and whether some of it is too deep to be measured."""
    try:
        root = os.open(directory, LIST)
    except OSError:
        return 0, False
    try:
        own = os.fstat(root)
        below, too_deep = _sum_below(root, own.st_dev, 0)
        return own.st_blocks * BLOCK + below + _sum_deleted(own.st_dev, pids), too_deep
    finally:
        os.close(root)


def _sum_below(root: int, device: int, level: int) -> tuple[int, bool]:
    """Return the bytes below the open directory `root` on its file system, and whether some are too deep."""
    total, too_deep = 0, False
    waiting = [("", [""])]  # (directory, subdirectories left); bound: the names on one way down
    while waiting:
        above, names = waiting[-1]
        if not names:
            waiting.pop()
            continue
        path = above + names.pop()
        try:
            fd = open_beneath(root, path.split("/") if path else [], LIST)
        except OSError:
            continue
        try:
            if len(os.fsencode(path)) > LONGEST_PATH:
                below, deeper = _sum_below(fd, device, level + 1) if level < MOST_LEVELS else (0, True)
                total, too_deep = total + below, too_deep or deeper
                continue
            inner, directories = _sum_entries(fd, device)
            total += inner
            waiting.append((f"{path}/" if path else "", directories))
        finally:
            os.close(fd)
    return total, too_deep


def _sum_entries(fd: int, device: int) -> tuple[int, list[str]]:
    """Return the bytes of one directory's entries, and the names of its subdirectories."""
    total, directories = 0, []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if found.st_dev != device:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    total += found.st_blocks * BLOCK
                    directories.append(entry.name)
                else:  # each hard link counts its share: no need to remember inodes
                    total += found.st_blocks * BLOCK // max(1, found.st_nlink)
    except OSError:
        pass  # the directory was removed while it was read
    return total, directories


def _sum_deleted(device: int, pids: Iterable[int]) -> int:
    """Return the bytes of deleted files, which exist as long as they are open."""
    sizes: dict[int, int] = {}  # inode -> bytes; bound: the open files of the sandbox's processes
    for pid in pids:
        for found in _list_open_files(pid):
            if found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                sizes[found.st_ino] = found.st_blocks * BLOCK
    return sum(sizes.values())


def _list_open_files(pid: int) -> Iterator[os.stat_result]:
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return  # the process has ended
    for descriptor in descriptors:
        try:
            yield descriptor.stat()
        except OSError:
            continue  # the process has just closed it


class MeasurePace:
    """Paces measurements: at most one per `least` seconds, and at most `share` of a core."""

    def __init__(self, least: float, share: float = 0.01) -> None:
        self._least = least
        self._share = share
        self._pause = 0.0  # seconds until the cost of the last measurement is within the share
        self._ended: float | None = None

    def record_cost(self, now: float, cost: float) -> None:
        """Record that a measurement ended at `now` and took `cost` seconds of CPU."""
        self._ended, self._pause = now, cost / self._share

    def wait(self, now: float) -> float:
        """Return the seconds until the next measurement is due."""
        if self._ended is None:
            return self._least
        return max(0.0, self._ended + max(self._least, self._pause) - now)

    def due(self, now: float) -> bool:
        return self._ended is None or self.wait(now) == 0.0

    def affordable(self, now: float) -> bool:
        """Whether one extra measurement is within the share of CPU."""
        return self._ended is None or now >= self._ended + self._pause


def sum_resident(pids: Iterable[int]) -> int:
    """Return the bytes of memory without file mappings; pages shared after a fork count for each process."""
    return sum(map(_read_resident, pids))


def sum_proportional(pids: Iterable[int]) -> int:
    """Return the same with shared pages counted once: exact, but some hundred times as expensive."""
    return sum(map(_read_proportional, pids))


def sum_cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time used so far by processes and their ended children."""
    return sum(map(_read_cpu_seconds, pids))


def count_tasks(user: int) -> int:
    """Return the number of a user's processes and threads, as `RLIMIT_NPROC` counts them."""
    return sum(_count_tasks(entry, user) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _read_resident(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0  # the process is gone
    return (int(fields[1]) - int(fields[2])) * PAGE


def _read_cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # the process is gone
    return sum(map(int, fields[11:15])) / TICKS


def _read_proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return _read_resident(pid)
    rows = dict(line.split(":", 1) for line in lines[1:] if ":" in line)
    return sum(int(rows.get(name, "0 kB").split()[0]) * 1024 for name in SHARES)


def _count_tasks(process: Path, user: int) -> int:
    try:
        return len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
    except OSError:
        return 0
