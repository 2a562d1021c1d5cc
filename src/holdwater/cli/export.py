"""`holdwater export`: a run as rows, or as what other programs read. A file appears whole or not at all."""

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

What = Literal["outcomes", "attempts", "pass-at-k", "exchanges", "trajectories"]
Format = Literal["jsonl", "csv", "atif", "openai-jsonl", "openhands", "swebench", "harbor"]
HINT = "for example `--out exported/`"
LINES = (".jsonl", ".json")  # what a file of predictions is called; any other name is a directory's


def export(
    run: str | None = None,
    /,
    *,
    what: What | None = None,
    format: Format = "jsonl",
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    all: Flag = False,
    json: Flag = False,
) -> int:
    """Write a run's outcomes, attempts, exchanges or trajectories, or the whole of it for another program.

    For example: `holdwater export latest --what attempts --format csv --out attempts.csv`,
    `holdwater export latest --format openai-jsonl --out tuning.jsonl`, or
    `holdwater export latest --format openhands --out eval/ --json`.

    Parameters
    ----------
    run
        The run's directory; `latest`, or nothing, is the newest in `runs/`.
    what
        What to write: outcomes, or with a format that is made for them trajectories, if nothing is said.
    format
        `jsonl`; `csv` for outcomes, attempts and pass@k; for trajectories `atif`, a file an attempt with its
        media beside it, or `openai-jsonl`, a conversation a line for fine-tuning; for all there is
        `openhands` (`output.jsonl` and its companions), `swebench` (predictions, and in a directory the
        report too) or `harbor` (a job for its viewer).
    out
        A file to write (for `atif`, `openhands` and `harbor` a directory); it replaces an earlier one when it
        is whole. Otherwise stdout.
    all
        With `openai-jsonl`: every attempt, not only the chosen ones that passed.
    json
        Print where it is, as a line of JSON: `{"output_json": ...}` for `openhands`, else `{"output": ...}`.
    """
    from ..ledger.export import DIRECTORIES
    from ..ledger.export import export as write

    if out is None and (json or format in DIRECTORIES.keys() - {"swebench"}):
        raise BadInput(f"`{'--json' if json else f'--format {format}'}` needs `--out`", HINT)
    path = find_run(run)
    if out is not None and format in DIRECTORIES and not (format == "swebench" and out.suffix in LINES):
        omitted = write(path, what, format, out, everything=all)
    else:
        with Console().stream() if out is None else whole_file(out) as target:
            omitted = write(path, what, format, target, everything=all)
    if json and out is not None:
        tell_place(format, out)
    return told(omitted)


def tell_place(format: Format, out: Path) -> None:
    """One line, as programs that run benchmarks end with."""
    import msgspec

    place = {"output_json": str(out / "output.jsonl")} if format == "openhands" else {"output": str(out)}
    with Console().stream() as stdout:
        stdout.write(msgspec.json.encode(place) + b"\n")


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
