"""Encodes records as MessagePack, and compresses values with zstd if that makes them smaller.

Encoding succeeds for any text: a lone surrogate in an error message (file names contain them) or a log line
of gigabytes must cost neither a verdict nor a worker. Frames of records are in `segment.py`.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any, BinaryIO

import msgspec
import zstandard

from ..core.masking import clean_text, mask_bytes
from ..core.records import Record

LARGEST_RECORD = 64 * 1024 * 1024  # bytes; in a larger record, long texts are cut
LEVEL = 3
QUICK_LEVEL = 1  # the level above `LARGE_CONTENT` bytes: an event loop may be waiting
LARGE_CONTENT = 1024 * 1024
SMALLEST_CONTENT = 128  # bytes; smaller content is not worth compressing
RAW, ZSTD = b"\0", b"\1"  # the first byte of a packed value


def encode_record(record: Record) -> bytes:
    """Encode a record that is stored: secrets in it are masked."""
    return mask_bytes(encode_unmasked(record))


def encode_unmasked(record: Record) -> bytes:
    """Encode a record for another process of the run."""
    try:
        content = _encode(record)
    except UnicodeEncodeError:
        content = None
    if content is not None and len(content) <= LARGEST_RECORD:
        return content
    return _encode(_clean_value(msgspec.to_builtins(record, builtin_types=(bytes,))))


def _clean_value(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {_clean_value(key): _clean_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_value(item) for item in value]
    return value


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
    """Return the content, compressed or not, with a leading byte that marks the form."""
    squeezed = shrink(content)
    return RAW + content if squeezed is None else ZSTD + squeezed


def unpack(packed: bytes) -> bytes:
    return expand(packed[1:]) if packed[:1] == ZSTD else packed[1:]


class _ZstdContexts(threading.local):
    """The contexts of one thread: a context is costly to create and must not be shared."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.quick = zstandard.ZstdCompressor(level=QUICK_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_encode = msgspec.msgpack.Encoder().encode
_contexts = _ZstdContexts()
