"""Writes exported files and directories atomically. `ledger/durable_files.py` does so for the ledger."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..core.errors import HoldwaterError


@contextmanager
def open_atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block succeeds, and is removed otherwise."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("wb") as file:
                yield file
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a document as readable JSON."""
    with open_atomic_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


@contextmanager
def open_atomic_directory(path: Path) -> Iterator[Path]:
    """Create a directory that replaces `path` if the block succeeds, and is removed otherwise."""
    new, old = (path.with_name(f".{path.name}.{what}") for what in ("new", "old"))
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
