"""Files and directories for others, which appear whole or not at all. The ledger's own are in `disk.py`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..core.errors import HoldwaterError


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves nothing otherwise."""
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


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """A directory to be filled, which takes the place of `path` when the block ends well."""
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
