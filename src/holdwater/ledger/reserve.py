"""The reserve: real bytes in the run directory that are given back when its disk is full, piece by piece.

The conductor alone makes pieces. Any process of the run may remove one when a write of its own finds no room:
nobody has to be asked, or answer. When that is done is said in `run/space.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..core.records import MiB
from .private import DIRECTORY, open_private

SIZE = 32 * MiB
SHARE = 100  # it takes at most this part of what is free
PIECES = 8
BLOCK = 4096
CHUNK = 1 * MiB
NONE = sys.maxsize


class Reserve:
    """The files of one run directory's reserve; their names are numbers that only rise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0  # the number of the piece that was made last

    def make(self, free: int) -> int:
        """Make the pieces that are missing, of `free` bytes of the disk; how many were made."""
        size = min(SIZE, free // SHARE) // PIECES // BLOCK * BLOCK
        there = self._numbers()
        self._last = max(self._last, *there, 0)
        made = 0
        for _ in range(PIECES - len(there) if size else 0):
            self._last += 1
            if not self._fill(self._piece(self._last), size):
                break
            made += 1
        return made

    def give(self, keep: int = 0) -> bool:
        """Give the oldest piece back; False when no more than `keep` are left."""
        numbers = self._numbers()
        for number in numbers[: max(0, len(numbers) - keep)]:
            try:
                self._piece(number).unlink()
            except FileNotFoundError:
                continue  # another process was faster
            return True
        return False

    def remove(self) -> None:
        """Give all of it back."""
        while self.give():
            pass

    @property
    def first(self) -> int:
        """The number of the oldest piece: it rises when one is given. `NONE` when there is none."""
        return min(self._numbers(), default=NONE)

    @property
    def pieces(self) -> int:
        return len(self._numbers())

    @property
    def bytes(self) -> int:
        """What is left."""
        return sum(_size(self._piece(number)) for number in self._numbers())

    def _numbers(self) -> list[int]:
        try:
            with os.scandir(self._path) as pieces:
                return sorted(int(piece.name) for piece in pieces if piece.name.isdecimal())
        except FileNotFoundError:
            return []

    def _piece(self, number: int) -> Path:
        return self._path / f"{number:06d}"

    def _fill(self, piece: Path, size: int) -> bool:
        """Whether there was room for it."""
        try:
            self._path.mkdir(mode=DIRECTORY, exist_ok=True)
            fd = open_private(str(piece), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError:
            return False
        try:
            _allocate(fd, size)
        except OSError:
            piece.unlink(missing_ok=True)
            return False
        finally:
            os.close(fd)
        return True


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
        return
    except OSError:
        pass  # some file systems cannot: what is written there, they must keep
    os.lseek(fd, 0, os.SEEK_SET)
    while size > 0:
        size -= os.write(fd, os.urandom(min(CHUNK, size)))  # zeros could be compressed to nothing


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
