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

from .beneath import LIST, LONGEST_PATH, change_mode, open_beneath, open_parent

BLOCK = 512  # bytes: the unit of `st_blocks`, whatever the file system
MOST_LEVELS = 64  # directories that are open at once, each `LONGEST_PATH` further down


class Measured(msgspec.Struct, frozen=True):
    used: int  # bytes
    cost: float  # seconds of CPU
    too_deep: bool = False  # some of it lies deeper than is measured, and may take any number of bytes


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
    """What a sandbox's `directory` takes, with the deleted files that `pids` still hold open. Blocks."""
    started = time.thread_time()
    _unlock(directory)
    total, too_deep = _measure(directory, pids)
    return Measured(total, time.thread_time() - started, too_deep)


def _unlock(directory: str) -> None:
    """Let us list the directories in it: an agent that locks one must not hide what it holds."""
    try:
        with open_parent(directory, []) as parent, os.scandir(directory) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) and mode & 0o500 != 0o500:
                    change_mode(entry.name, parent, stat.S_IMODE(mode) | 0o700)
    except OSError:
        return  # it is not there yet, or being removed; what cannot be seen does not count


def used(directory: str, pids: Iterable[int] = ()) -> int:
    """Bytes on disk; what cannot be seen, or vanishes meanwhile, does not count."""
    return _measure(directory, pids)[0]


def _measure(directory: str, pids: Iterable[int]) -> tuple[int, bool]:
    """The same, and whether some of it lies too deep to be seen."""
    try:
        root = os.open(directory, LIST)
    except OSError:
        return 0, False
    try:
        own = os.fstat(root)
        below, too_deep = _below(root, own.st_dev, 0)
        return own.st_blocks * BLOCK + below + _deleted(own.st_dev, pids), too_deep
    finally:
        os.close(root)


def _below(root: int, device: int, level: int) -> tuple[int, bool]:
    """The sum over all that is below the open directory `root`, on the same file system; is it too deep?"""
    total, too_deep = 0, False
    waiting = [("", [""])]  # a directory, and those in it still to come; bound: their names on one way down
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
                below, deeper = _below(fd, device, level + 1) if level < MOST_LEVELS else (0, True)
                total, too_deep = total + below, too_deep or deeper
                continue
            inner, directories = _listed(fd, device)
            total += inner
            waiting.append((f"{path}/" if path else "", directories))
        finally:
            os.close(fd)
    return total, too_deep


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
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return  # the process has gone
    for descriptor in descriptors:
        try:
            yield descriptor.stat()
        except OSError:
            continue  # the process has just closed it


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
