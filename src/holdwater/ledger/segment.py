"""Append-only files of framed records: a header with its own checksum, then the payload, compressed or not.

A frame is 16 bytes (`hW`, flags, version, length, CRC of the payload, CRC of the header) and its payload.
A file that ends within a frame was torn by a crash: the complete frames before are valid. A bad frame before
a good one is corruption. `exchanges.py` and `journal.py` define the contents of the records.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import zstandard

from ..core.errors import LedgerCorrupt
from .durable_files import cannot_write, make_directory, open_private, sync_directory, write_all
from .record_encoding import expand, open_expanded, shrink

MAGIC = b"hW"
VERSION = 1
COMPRESSED_FLAG = 1
SCAN_SIZE = 1 << 20  # bytes scanned at a time after a bad frame
ZSTD_HEADER = 18  # most bytes of the header of a zstd frame, which has the size of the content
PIECE = 256 * 1024  # bytes of a large record in memory at a time
_FIELDS = struct.Struct("<2sBBII")
_CHECK = struct.Struct("<I")
HEADER = _FIELDS.size + _CHECK.size


class Segment:
    """A segment open for appending, by one writer."""

    def __init__(self, path: Path, fd: int, size: int) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._unsynced = False
        self._directory_synced = False

    @classmethod
    def open(cls, path: Path) -> Segment:
        """Open a segment for appending, creating it if it is missing; a torn tail is cut off."""
        try:
            make_directory(path.parent)
            fd = open_private(str(path), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as e:
            raise cannot_write(path, e) from e
        try:
            size = os.fstat(fd).st_size
            whole = _find_end(path) if size else 0
            if whole < size:
                os.ftruncate(fd, whole)
        except BaseException:  # boundary: close the file, then raise again
            os.close(fd)
            raise
        return cls(path, fd, whole)

    def append(self, payload: bytes) -> None:
        """Write one record so that it survives kill -9; on an error, only complete records remain."""
        content = make_frame(payload)
        try:
            write_all(self._fd, content)
        except OSError as e:
            os.ftruncate(self._fd, self.size)
            raise cannot_write(self.path, e) from e
        self.size += len(content)
        self._unsynced = True

    def sync(self) -> None:
        """Make the records so far survive power loss. Blocks on the disk."""
        if not self._unsynced:
            return
        self._unsynced = False  # before fsync: another thread may append during it
        try:
            os.fsync(self._fd)
            if not self._directory_synced:
                sync_directory(self.path.parent)
                sync_directory(self.path.parent.parent)
        except OSError as e:
            self._unsynced = True
            raise cannot_write(self.path, e) from e
        self._directory_synced = True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def make_frame(payload: bytes) -> bytes:
    squeezed = shrink(payload)
    body, flags = (payload, 0) if squeezed is None else (squeezed, COMPRESSED_FLAG)
    fields = _FIELDS.pack(MAGIC, flags, VERSION, len(body), zlib.crc32(body))
    return b"".join((fields, _CHECK.pack(zlib.crc32(fields)), body))


def read_records(path: Path, on_damage: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """Yield the records, one in memory at a time; stop at a torn tail, raise at corruption before it.

    With `on_damage` it does not raise: it reports the first byte of each damaged range and skips the range.
    """
    for payload, _ in _scan_records(path, on_damage=on_damage):
        yield payload


def read_with_offsets(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the records as `read_records` does, each with the byte where it begins."""
    at = 0
    for payload, end in _scan_records(path):
        yield at, payload
        at = end


def read_record(path: Path, at: int) -> bytes:
    """Return the record that begins at byte `at`."""
    for payload, _ in _scan_records(path, at):
        return payload
    raise _damage_error(path, at)


class SegmentRecord(NamedTuple):
    """A record, and the bytes of the file where its frame begins and ends."""

    at: int
    end: int
    content: bytes | None  # None: it is larger than the reader wants at once
    read_pieces: Callable[[], Iterator[bytes]]  # its content a piece at a time, while it is the current one


def scan_bounded(path: Path, largest: int, at: int = 0) -> Iterator[SegmentRecord]:
    """Yield the records from byte `at` on, also those above `largest` bytes, in bounded memory.

    It stops at a torn tail and raises at corruption before it.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            header = _read_header(file, at)
            end = at + HEADER + header[1] if header else 0
            if header and end > size:
                return  # torn
            large = header is not None and _measure_record(file, header) > largest
            content = _read_payload(file, header) if header and not large else None
            if header is None or (content is None and not large):
                if _find_frame(file, at + 1, size) is None:
                    return
                raise _damage_error(path, at)
            yield SegmentRecord(at, end, content, partial(_read_pieces, file, at, header))
            at = end


def _measure_record(file: BinaryIO, header: tuple[int, int, int]) -> int:
    """Return the bytes of the record whose header was just read; the file stays there."""
    flags, length, _ = header
    if not flags & COMPRESSED_FLAG:
        return length
    at = file.tell()
    beginning = file.read(min(length, ZSTD_HEADER))
    file.seek(at)
    try:
        return max(length, zstandard.frame_content_size(beginning))
    except zstandard.ZstdError:
        return length  # damaged: reading it fails too


def _read_pieces(file: BinaryIO, at: int, header: tuple[int, int, int]) -> Iterator[bytes]:
    """Yield the content of a large record. Its checksum is not checked: that would read it twice."""
    flags, length, _ = header
    file.seek(at + HEADER)
    body = cast(BinaryIO, _FrameBody(file, length))
    try:
        with open_expanded(body, squeezed=bool(flags & COMPRESSED_FLAG)) as content:
            while piece := content.read(PIECE):
                yield piece
    except zstandard.ZstdError:
        hint = "restore the file from a copy"
        raise LedgerCorrupt(f"a large record is damaged at byte {at}", hint) from None


class _FrameBody:
    """Reads the body of one frame: a decompressor of the file would go on into the next frame."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        self._file = file
        self._left = length

    def read(self, size: int) -> bytes:
        piece = self._file.read(min(size, self._left))
        self._left -= len(piece)
        return piece


def _find_end(path: Path) -> int:
    """Return the byte where the last complete frame ends."""
    whole = 0
    for _, end in _scan_records(path):
        whole = end
    return whole


def _scan_records(
    path: Path, at: int = 0, on_damage: Callable[[int], None] | None = None
) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            header = _read_header(file, at)
            end = at + HEADER + header[1] if header else 0
            if header and end > size:
                return  # torn: the writer was stopped while it wrote this frame
            payload = _read_payload(file, header) if header else None
            if payload is not None:
                yield payload, end
                at = end
                continue
            following = _find_frame(file, at + 1, size)
            if on_damage is None and following is not None:
                raise _damage_error(path, at)
            if on_damage is not None and size - at >= HEADER:
                on_damage(at)
            if following is None:
                return  # no good frame follows: power loss took pages from the tail
            at = following


def _read_header(file: BinaryIO, at: int) -> tuple[int, int, int] | None:
    """Return flags, length and CRC of the frame at `at`; None if there is no valid header."""
    file.seek(at)
    content = file.read(HEADER)
    if len(content) < HEADER or _CHECK.unpack_from(content, _FIELDS.size)[0] != zlib.crc32(
        content[: _FIELDS.size]
    ):
        return None
    magic, flags, version, length, crc = _FIELDS.unpack_from(content)
    return (flags, length, crc) if magic == MAGIC and version == VERSION else None


def _read_payload(file: BinaryIO, header: tuple[int, int, int]) -> bytes | None:
    """Return the record whose header was just read; None if it is damaged."""
    flags, length, crc = header
    body = file.read(length)
    if len(body) < length or zlib.crc32(body) != crc:
        return None
    try:
        return expand(body) if flags & COMPRESSED_FLAG else body
    except zstandard.ZstdError:
        return None


def _find_frame(file: BinaryIO, at: int, size: int) -> int | None:
    """Return the byte where the first complete frame at or after `at` begins; None if there is none."""
    while at < size:
        file.seek(at)
        chunk = file.read(SCAN_SIZE)
        found = chunk.find(MAGIC)
        while found >= 0:
            header = _read_header(file, at + found)
            if header and at + found + HEADER + header[1] <= size and _read_payload(file, header) is not None:
                return at + found
            found = chunk.find(MAGIC, found + 1)
        at += max(1, len(chunk) - 1)  # a magic may span two chunks
    return None


def _damage_error(path: Path, at: int) -> LedgerCorrupt:
    return LedgerCorrupt(f"`{path}` is damaged at byte {at}", hint="restore the file from a copy")
