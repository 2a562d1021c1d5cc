"""Compresses finished files where they stand: `x.log` becomes `x.log.zst`, whole or not at all.

Small records go through `compression.py`; which files are compressed is said in `prune.py`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from .compression import LEVEL
from .disk import sync_directory
from .files import SQUEEZED, is_plain, taken
from .private import open_private

BLOCK = 4096  # bytes: what is no larger takes as much in any form
ASIDE = "squeezed.new"  # one file at a time is being written, under the run's lock


def squeeze(path: Path) -> int:
    """Put the compressed form in the place of a file; the bytes that frees. 0: it stays as it is."""
    if not _is_worthwhile(path):
        return 0
    new = path.with_name(ASIDE)
    with path.open("rb") as source, open(new, "wb", opener=open_private) as target:
        _compressor().copy_stream(source, target)
        target.flush()
        os.fsync(target.fileno())
    shutil.copystat(path, new)
    won = taken(path) - taken(new)
    if won <= 0:
        new.unlink()
        return 0
    new.replace(path.with_name(path.name + SQUEEZED))
    path.unlink()
    sync_directory(path.parent)
    return won


def squeezed_saving(path: Path) -> int:
    """What `squeeze` would free, about: nothing is written."""
    if not _is_worthwhile(path):
        return 0
    sink = _Count()
    with path.open("rb") as source:
        _compressor().copy_stream(source, cast(BinaryIO, sink))
    return max(0, taken(path) - -(-sink.bytes // BLOCK) * BLOCK)


def _is_worthwhile(path: Path) -> bool:
    return is_plain(path) and path.lstat().st_size > BLOCK


def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=LEVEL)


class _Count:
    """A file that is only measured."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, content: bytes) -> int:
        self.bytes += len(content)
        return len(content)
