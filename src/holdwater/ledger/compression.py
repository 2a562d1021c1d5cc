"""zstd where it helps, marked by a leading byte. Everything small that the ledger keeps goes through here.

One compressor a thread: a context is costly to make and not to be shared. Frames are in `segment.py`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import BinaryIO

import zstandard

LEVEL = 3
QUICK = 1  # the level for more than `MUCH` bytes: an event loop may wait for them
MUCH = 1024 * 1024
WORTHWHILE = 128  # bytes below which compressing is a waste of time
RAW, ZSTD = b"\0", b"\1"


def shrink(content: bytes) -> bytes | None:
    """The compressed form, or None when it is no smaller."""
    if len(content) < WORTHWHILE:
        return None
    compressor = _contexts.quick if len(content) > MUCH else _contexts.compressor
    squeezed = compressor.compress(content)
    return squeezed if len(squeezed) < len(content) else None


def expand(squeezed: bytes) -> bytes:
    """The content of what `shrink` gave; `zstandard.ZstdError` when it is something else."""
    return _contexts.decompressor.decompress(squeezed)


def reading(file: BinaryIO, *, squeezed: bool) -> AbstractContextManager[BinaryIO]:
    """What is in `file`, piece by piece, as it was before `shrink`."""
    if not squeezed:
        return nullcontext(file)
    return zstandard.ZstdDecompressor().stream_reader(file, closefd=False)


def pack(content: bytes) -> bytes:
    squeezed = shrink(content)
    return RAW + content if squeezed is None else ZSTD + squeezed


def unpack(packed: bytes) -> bytes:
    return expand(packed[1:]) if packed[:1] == ZSTD else packed[1:]


class _Contexts(threading.local):
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.quick = zstandard.ZstdCompressor(level=QUICK)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()
