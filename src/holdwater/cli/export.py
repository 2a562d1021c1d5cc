"""`holdwater export`: a run's rows and trajectories, streamed. A file appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from cyclopts import Parameter

from ..core.errors import BadInput, HoldwaterError
from .console import Console
from .flags import Flag, find_run

What = Literal["outcomes", "attempts", "exchanges", "trajectories"]
Format = Literal["jsonl", "csv", "atif", "openai-jsonl"]


def export(
    run: str | None = None,
    /,
    *,
    what: What | None = None,
    format: Format = "jsonl",
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    all: Flag = False,
) -> int:
    """Write a run's outcomes, attempts, exchanges or trajectories.

    For example: `holdwater export latest --what attempts --format csv --out attempts.csv`,
    `holdwater export latest --format atif --out trajectories/`, or
    `holdwater export latest --format openai-jsonl --out tuning.jsonl`.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    what
        What to write: outcomes, or with a format that is made for them trajectories, if nothing is said.
    format
        `jsonl`; `csv` for outcomes and attempts; for trajectories `atif`, a file an attempt with its media
        beside it, or `openai-jsonl`, a conversation a line for fine-tuning.
    out
        A file to write (for `atif` a directory); it replaces an earlier one when it is whole. Otherwise
        stdout.
    all
        With `openai-jsonl`: every attempt, not only the chosen ones that passed.
    """
    from ..ledger.export import export as write

    if format == "atif":
        if out is None:
            raise BadInput("`--format atif` needs `--out`", "a directory, for example `--out trajectories/`")
        return told(write(find_run(run), what, format, out, everything=all))
    with Console().stream() if out is None else whole_file(out) as target:
        omitted = write(find_run(run), what, format, target, everything=all)
    return told(omitted)


def told(omitted: str) -> int:
    """Say what could not be written; that it is not kept is no failure."""
    if omitted:
        console = Console()
        console.say(f"note: {omitted}")
        console.flush()
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
