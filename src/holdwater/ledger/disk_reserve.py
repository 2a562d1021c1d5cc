"""The disk reserve: allocated files in the run directory that are released one by one when the disk is full.

Only the conductor creates pieces. Any process of the run may remove one when a write fails for lack of space,
without coordination with other processes. `run/resources/disk_space.py` decides when to create and release.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..core.records import MiB
from .durable_files import DIRECTORY_MODE, open_private

LARGEST_RESERVE = 32 * MiB
FREE_SHARE = 100  # the reserve takes at most 1/100 of the free space
PIECES = 8
BLOCK = 4096
CHUNK = 1 * MiB
NO_PIECE = sys.maxsize


class DiskReserve:
    """The files of one run directory's reserve; their names are increasing numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last = 0  # the number of the newest piece

    def make_pieces(self, free: int) -> int:
        """Create missing pieces, sized by the `free` bytes of the disk; return the number created."""
        size = min(LARGEST_RESERVE, free // FREE_SHARE) // PIECES // BLOCK * BLOCK
        there = self._numbers()
        self._last = max(self._last, *there, 0)
        made = 0
        for _ in range(PIECES - len(there) if size else 0):
            self._last += 1
            if not self._fill(self._piece_path(self._last), size):
                break
            made += 1
        return made

    def release_piece(self, keep: int = 0) -> bool:
        """Remove the oldest piece; return False if at most `keep` pieces are left."""
        numbers = self._numbers()
        for number in numbers[: max(0, len(numbers) - keep)]:
            try:
                self._piece_path(number).unlink()
            except FileNotFoundError:
                continue  # another process removed it first
            return True
        return False

    def remove(self) -> None:
        """Remove all pieces."""
        while self.release_piece():
            pass

    @property
    def oldest_piece(self) -> int:
        """The number of the oldest piece, which rises with each release. `NO_PIECE` if there is none."""
        return min(self._numbers(), default=NO_PIECE)

    @property
    def pieces(self) -> int:
        return len(self._numbers())

    @property
    def bytes(self) -> int:
        """The bytes of the remaining pieces."""
        return sum(_measure_piece(self._piece_path(number)) for number in self._numbers())

    def _numbers(self) -> list[int]:
        try:
            with os.scandir(self._path) as pieces:
                return sorted(int(piece.name) for piece in pieces if piece.name.isdecimal())
        except FileNotFoundError:
            return []

    def _piece_path(self, number: int) -> Path:
        return self._path / f"{number:06d}"

    def _fill(self, piece: Path, size: int) -> bool:
        """Create a piece; return whether there was space for it."""
        try:
            self._path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
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
        pass  # some file systems do not support it: write the bytes instead
    os.lseek(fd, 0, os.SEEK_SET)
    while size > 0:
        size -= os.write(fd, os.urandom(min(CHUNK, size)))  # a file system could compress zeros away


def _measure_piece(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
