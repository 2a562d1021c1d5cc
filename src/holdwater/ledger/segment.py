"""Append-only files of framed records: a header that checks itself, then the payload, zstd where it helps.

A frame is 16 bytes (`hW`, flags, version, length, CRC of the payload, CRC of the header) and its payload.
A file that ends within a frame was torn by a crash: the whole frames before count. A bad frame with good ones
after it is corruption. What the records mean is said in `exchanges.py` and `journal.py`.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from ..core.errors import LedgerCorrupt
from .compression import expand, shrink
from .disk import cannot_write, sync_directory, write_all
from .private import make_directory, open_private

MAGIC = b"hW"
VERSION = 1
SQUEEZED = 1
SCAN = 1 << 20  # bytes looked through at a time behind a bad frame
_FIELDS = struct.Struct("<2sBBII")
_CHECK = struct.Struct("<I")
HEADER = _FIELDS.size + _CHECK.size


class Segment:
    """A segment that is being written, by one writer."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._unsynced = False
        self._named = False

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open for appending, made if it is missing; a torn tail is cut off."""
        try:
            make_directory(path.parent)
            fd = open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as e:
            raise cannot_write(path, e) from e
        try:
            size = os.fstat(fd).st_size
            whole = _whole(path) if size else 0
            if whole < size:
                os.ftruncate(fd, whole)
        except BaseException:  # boundary: given back, then raised again
            os.close(fd)
            raise
        return cls(path, fd, whole)

    def append(self, payload: bytes) -> None:
        """Write one record so that it survives kill -9; an error leaves the whole records before it."""
        content = frame(payload)
        try:
            write_all(self._fd, content)
        except OSError as e:
            os.ftruncate(self._fd, self.size)
            raise cannot_write(self.path, e) from e
        self.size += len(content)
        self._unsynced = True

    def sync(self) -> None:
        """Make what was written survive power loss. Blocks for as long as the disk takes."""
        if not self._unsynced:
            return
        self._unsynced = False  # first: another thread may append meanwhile, and that is not synced
        try:
            os.fsync(self._fd)
            if not self._named:
                sync_directory(self.path.parent)
                sync_directory(self.path.parent.parent)
        except OSError as e:
            self._unsynced = True
            raise cannot_write(self.path, e) from e
        self._named = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def frame(payload: bytes) -> bytes:
    squeezed = shrink(payload)
    body, flags = (payload, 0) if squeezed is None else (squeezed, SQUEEZED)
    fields = _FIELDS.pack(MAGIC, flags, VERSION, len(body), zlib.crc32(body))
    return b"".join((fields, _CHECK.pack(zlib.crc32(fields)), body))


def read(path: Path, on_damage: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The records, one in memory at a time; ends at a torn tail, raises at corruption before it.

    With `on_damage` it does not raise: each damaged stretch is reported by its first byte and passed over.
    """
    for payload, _ in _records(path, on_damage=on_damage):
        yield payload


def places(path: Path) -> Iterator[tuple[int, bytes]]:
    """The records with the byte where each begins, as `read` gives them."""
    at = 0
    for payload, end in _records(path):
        yield at, payload
        at = end


def read_at(path: Path, at: int) -> bytes:
    """The record that begins at byte `at`."""
    for payload, _ in _records(path, at):
        return payload
    raise _damaged(path, at)


def _whole(path: Path) -> int:
    """Where the last whole frame ends."""
    whole = 0
    for _, end in _records(path):
        whole = end
    return whole


def _records(
    path: Path, at: int = 0, on_damage: Callable[[int], None] | None = None
) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            header = _header(file, at)
            end = at + HEADER + header[1] if header else 0
            if header and end > size:
                return  # torn: the writer was stopped within this frame
            payload = _payload(file, header) if header else None
            if payload is not None:
                yield payload, end
                at = end
                continue
            following = _next_frame(file, at + 1, size)
            if on_damage is None and following is not None:
                raise _damaged(path, at)
            if on_damage is not None and size - at >= HEADER:
                on_damage(at)
            if following is None:
                return  # nothing good follows: pages that power loss took from the tail
            at = following


def _header(file: BinaryIO, at: int) -> tuple[int, int, int] | None:
    """Flags, length and CRC of the frame at `at`; None when there is no header."""
    file.seek(at)
    content = file.read(HEADER)
    if len(content) < HEADER or _CHECK.unpack_from(content, _FIELDS.size)[0] != zlib.crc32(
        content[: _FIELDS.size]
    ):
        return None
    magic, flags, version, length, crc = _FIELDS.unpack_from(content)
    return (flags, length, crc) if magic == MAGIC and version == VERSION else None


def _payload(file: BinaryIO, header: tuple[int, int, int]) -> bytes | None:
    """The record whose header was just read; None when it is not what was written."""
    flags, length, crc = header
    body = file.read(length)
    if len(body) < length or zlib.crc32(body) != crc:
        return None
    try:
        return expand(body) if flags & SQUEEZED else body
    except zstandard.ZstdError:
        return None


def _next_frame(file: BinaryIO, at: int, size: int) -> int | None:
    """Where the first whole frame from `at` on begins."""
    while at < size:
        file.seek(at)
        chunk = file.read(SCAN)
        found = chunk.find(MAGIC)
        while found >= 0:
            header = _header(file, at + found)
            if header and at + found + HEADER + header[1] <= size and _payload(file, header) is not None:
                return at + found
            found = chunk.find(MAGIC, found + 1)
        at += max(1, len(chunk) - 1)  # a magic may lie across two chunks
    return None


def _damaged(path: Path, at: int) -> LedgerCorrupt:
    return LedgerCorrupt(f"`{path}` is damaged at byte {at}", hint="restore the file from a copy")
