"""Compresses small values of the ledger with zstd if that makes them smaller; a leading byte marks the form.

Each thread has its own compressor: a context is costly to create and must not be shared. Frames are in
`segment.py`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

import zstandard

LEVEL = 3
QUICK_LEVEL = 1  # the level above `LARGE_CONTENT` bytes: an event loop may be waiting
LARGE_CONTENT = 1024 * 1024
SMALLEST_CONTENT = 128  # bytes; smaller content is not worth compressing
RAW, ZSTD = b"\0", b"\1"


def shrink(content: bytes) -> bytes | None:
    """Return the compressed content, or None if it is not smaller."""
    if len(content) < SMALLEST_CONTENT:
        return None
    compressor = _contexts.quick if len(content) > LARGE_CONTENT else _contexts.compressor
    squeezed = compressor.compress(content)
    return squeezed if len(squeezed) < len(content) else None


def expand(squeezed: bytes) -> bytes:
    """Decompress the result of `shrink`; raise `zstandard.ZstdError` on anything else."""
    return _contexts.decompressor.decompress(squeezed)


def open_expanded(file: BinaryIO, *, squeezed: bool) -> AbstractContextManager[BinaryIO]:
    """Open `file` for reading in pieces, decompressed if `squeezed`."""
    if not squeezed:
        return nullcontext(file)
    return zstandard.ZstdDecompressor().stream_reader(file, closefd=False)


def pack(content: bytes) -> bytes:
    squeezed = shrink(content)
    return RAW + content if squeezed is None else ZSTD + squeezed


def unpack(packed: bytes) -> bytes:
    return expand(packed[1:]) if packed[:1] == ZSTD else packed[1:]


class _ZstdContexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.quick = zstandard.ZstdCompressor(level=QUICK_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _ZstdContexts()
