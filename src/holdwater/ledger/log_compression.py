"""Compresses finished files in place and atomically: `x.log` becomes `x.log.zst`.

Small records are compressed by `compression.py`; `pruning.py` decides which files are compressed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from .compression import LEVEL
from .durable_files import sync_directory
from .files import COMPRESSED_SUFFIX, is_regular_file, measure_file
from .private_files import open_private

BLOCK_SIZE = 4096  # bytes: a file of at most this size takes one block, compressed or not
TEMPORARY_NAME = "squeezed.new"  # a fixed name is enough: one file is written at a time, under the run's lock


def compress_log(path: Path) -> int:
    """Replace a file by its compressed form; return the bytes freed, 0 if the file stays as it is."""
    if not _is_worthwhile(path):
        return 0
    new = path.with_name(TEMPORARY_NAME)
    with path.open("rb") as source, open(new, "wb", opener=open_private) as target:
        _make_compressor().copy_stream(source, target)
        target.flush()
        os.fsync(target.fileno())
    shutil.copystat(path, new)
    won = measure_file(path) - measure_file(new)
    if won <= 0:
        new.unlink()
        return 0
    new.replace(path.with_name(path.name + COMPRESSED_SUFFIX))
    path.unlink()
    sync_directory(path.parent)
    return won


def estimate_saving(path: Path) -> int:
    """Return roughly the bytes that `compress_log` would free, without writing anything."""
    if not _is_worthwhile(path):
        return 0
    sink = _ByteCounter()
    with path.open("rb") as source:
        _make_compressor().copy_stream(source, cast(BinaryIO, sink))
    return max(0, measure_file(path) - -(-sink.bytes // BLOCK_SIZE) * BLOCK_SIZE)


def _is_worthwhile(path: Path) -> bool:
    return is_regular_file(path) and path.lstat().st_size > BLOCK_SIZE


def _make_compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL)


class _ByteCounter:
    """A write-only file that counts bytes and discards them."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.bytes += len(content)
        return len(content)
