"""`holdwater export`: a run's rows as JSONL or CSV, streamed. A file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from cyclopts import Parameter

from ..core.errors import BadInput, HoldwaterError
from .console import Console
from .flags import find_run

What = Literal["outcomes", "attempts", "exchanges"]
Format = Literal["jsonl", "csv"]


def export(
    run: str | None = None,
    /,
    *,
    what: What = "outcomes",
    format: Format = "jsonl",
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
) -> int:
    """Write a run's outcomes, attempts or exchanges as JSONL or CSV.

    For example: `holdwater export latest --what attempts --format csv --out attempts.csv`

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    what
        Which rows to write.
    format
        How to write them; exchanges are JSONL only.
    out
        A file to write; it replaces an earlier one when it is whole. Otherwise stdout.
    """
    from ..ledger.export import export as write

    with Console().stream() if out is None else whole_file(out) as target:
        write(find_run(run), what, format, target)
    return 0


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well, and leaves nothing otherwise."""
    path = path.resolve()  # a link stays a link, to the new content
    if path.exists() and not path.is_file():
        with opened(path, path) as device:  # a pipe or a device is written to, never replaced
            yield device
        return
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}.new")
    try:
        with opened(new, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)


def opened(path: Path, asked: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise BadInput(f"cannot write `{asked}`: {error.strerror}") from None
