"""How many bytes a sandbox's directory takes on disk, and how often it is worth asking.

It measures and refuses nothing: `watch.py` does. It remembers no file: a tree of millions costs no memory.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

BLOCK = 512  # bytes: the unit of `st_blocks`, whatever the file system
LONGEST_PATH = 2000  # bytes below one opened directory; the kernel takes 4096
MOST_LEVELS = 64  # directories that are open at once, each `LONGEST_PATH` further down
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Measured(msgspec.Struct, frozen=True):
    used: int  # bytes
    cost: float  # seconds of CPU


def free(directory: str) -> int:
    """Bytes that are free on its file system."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bfree * space.f_frsize


def room(directory: str) -> tuple[int, int] | None:
    """Bytes that can be written to its file system, of how many; None where it does not tell."""
    try:
        space = os.statvfs(directory)
    except OSError:
        return None
    return (space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize) if space.f_blocks else None


def measure(directory: str, pids: Iterable[int] = ()) -> Measured:
    """What `directory` takes, with the deleted files that `pids` still hold open. Blocks."""
    started = time.thread_time()
    return Measured(used(directory, pids), time.thread_time() - started)


def used(directory: str, pids: Iterable[int] = ()) -> int:
    """Bytes on disk; what cannot be seen, or vanishes meanwhile, does not count."""
    try:
        root = os.open(directory, DIRECTORY)
    except OSError:
        return 0
    try:
        own = os.fstat(root)
        return own.st_blocks * BLOCK + _below(root, own.st_dev, 0) + _deleted(own.st_dev, pids)
    finally:
        os.close(root)


def _below(root: int, device: int, level: int) -> int:
    """The sum over all that is below the open directory `root`, on the same file system."""
    total = 0
    waiting = [("", ["."])]  # a directory, and those in it still to come; bound: their names on one way down
    while waiting:
        above, names = waiting[-1]
        if not names:
            waiting.pop()
            continue
        path = above + names.pop()
        try:
            fd = os.open(path, DIRECTORY, dir_fd=root)
        except OSError:
            continue
        try:
            if len(os.fsencode(path)) > LONGEST_PATH:
                total += _below(fd, device, level + 1) if level < MOST_LEVELS else 0
                continue
            inner, directories = _listed(fd, device)
            total += inner
            waiting.append((f"{path}/", directories))
        finally:
            os.close(fd)
    return total


def _listed(fd: int, device: int) -> tuple[int, list[str]]:
    """What the entries of one directory take, and which of them are directories."""
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
                else:  # each of its names bears its part: no need to remember which were seen
                    total += found.st_blocks * BLOCK // max(1, found.st_nlink)
    except OSError:
        pass  # the directory went while it was read
    return total, directories


def _deleted(device: int, pids: Iterable[int]) -> int:
    """What is on no path any more and lives as long as it is open."""
    sizes: dict[int, int] = {}  # inode -> bytes; bound: what the sandbox's processes may have open
    for pid in pids:
        for found in _open_files(pid):
            if found.st_nlink == 0 and found.st_dev == device and stat.S_ISREG(found.st_mode):
                sizes[found.st_ino] = found.st_blocks * BLOCK
    return sum(sizes.values())


def _open_files(pid: int) -> Iterator[os.stat_result]:
    try:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            yield descriptor.stat()
    except OSError:
        return  # it has gone, or has just closed one


class Pace:
    """When to measure again: at most each `least` seconds, and for at most `share` of a core."""

    def __init__(self, least: float, share: float = 0.01) -> None:
        self._least = least
        self._share = share
        self._pause = 0.0  # seconds that the last measuring has to be paid off in
        self._ended: float | None = None

    def ended(self, now: float, cost: float) -> None:
        """A measuring ended `now` and took `cost` seconds of CPU."""
        self._ended, self._pause = now, cost / self._share

    def wait(self, now: float) -> float:
        """Seconds until the next one is due."""
        if self._ended is None:
            return self._least
        return max(0.0, self._ended + max(self._least, self._pause) - now)

    def due(self, now: float) -> bool:
        return self._ended is None or self.wait(now) == 0.0

    def affordable(self, now: float) -> bool:
        """Whether one more may be made out of turn."""
        return self._ended is None or now >= self._ended + self._pause
