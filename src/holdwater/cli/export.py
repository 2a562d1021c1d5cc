"""`holdwater export`: writes a run as rows or for another program. A file appears complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from cyclopts import Parameter

from ..core.errors import BadInput, HoldwaterError
from .console import CommandConsole
from .flags import Flag, LatestRun

What = Literal["outcomes", "attempts", "pass-at-k", "exchanges", "trajectories"]
Format = Literal["jsonl", "csv", "atif", "openai-jsonl", "openhands", "swebench", "harbor"]
HINT = "for example `--out exported/`"
LINE_SUFFIXES = (".jsonl", ".json")  # suffixes of a predictions file; any other name is a directory


def export(
    run: LatestRun = None,
    /,
    *,
    what: What | None = None,
    format: Format = "jsonl",
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    all: Flag = False,
    json: Flag = False,
) -> int:
    """Write a run's outcomes, attempts, exchanges or trajectories, or all of it for another program.

    For example: `holdwater export latest --what attempts --format csv --out attempts.csv`,
    `holdwater export latest --format openai-jsonl --out tuning.jsonl`, or
    `holdwater export latest --format openhands --out eval/ --json`.

    Parameters
    ----------
    what
        What to write. The default is outcomes, or trajectories if the format is made for them.
    format
        `jsonl`; `csv` for outcomes, attempts and pass@k; for trajectories `atif` (one file per attempt, with
        its media beside it) or `openai-jsonl` (one conversation per line, for fine-tuning); for the whole run
        `openhands` (`output.jsonl` and its companion files), `swebench` (predictions; in a directory also the
        report) or `harbor` (a job for its viewer).
    out
        The output file (for `atif`, `openhands` and `harbor` a directory); an existing one is replaced when
        the new one is complete. Default: stdout.
    all
        With `openai-jsonl`: write every attempt, not only the chosen ones that passed.
    json
        Print the output's path as a line of JSON: `{"output_json": ...}` for `openhands`, else
        `{"output": ...}`.
    """
    from ..api.reading import DIRECTORY_FORMATS, find_run

    if out is None and (json or format in DIRECTORY_FORMATS.keys() - {"swebench"}):
        raise BadInput(f"`{'--json' if json else f'--format {format}'}` needs `--out`", HINT)
    omitted = write_export(find_run(run), out, what, format, everything=all)
    if json and out is not None:
        print_place(format, out)
    return print_omitted(omitted)


def write_export(path: Path, out: Path | None, what: What | None, format: Format, *, everything: bool) -> str:
    """Write the export to a directory, a file or stdout; return a description of the omitted data."""
    from ..api.reading import DIRECTORY_FORMATS
    from ..api.reading import export as write

    lines = format == "swebench" and out is not None and out.suffix in LINE_SUFFIXES
    if out is not None and format in DIRECTORY_FORMATS and not lines:
        return write(path, out, what=what, format=format, everything=everything)
    with CommandConsole().stream() if out is None else open_replacement(out) as target:
        return write(path, target, what=what, format=format, everything=everything)


def print_place(format: Format, out: Path) -> None:
    """Print the output's path in one line, as benchmark programs do at their end."""
    import msgspec

    place = {"output_json": str(out / "output.jsonl")} if format == "openhands" else {"output": str(out)}
    with CommandConsole().stream() as stdout:
        stdout.write(msgspec.json.encode(place) + b"\n")


def print_omitted(omitted: str) -> int:
    """Print what was left out of the export; data that was not kept is not an error, so return 0."""
    if omitted:
        console = CommandConsole()
        console.say(f"note: {omitted}")
        console.flush()
    return 0


@contextmanager
def open_replacement(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` if the block succeeds, and is removed otherwise."""
    path = path.resolve()  # a link keeps its target, which gets the new content
    if path.exists() and not path.is_file():
        with open_output(path, path) as device:  # write to a pipe or a device directly, never replace it
            yield device
        return
    new = path.with_name(f".{path.name[:100]}.{os.getpid()}.new")
    try:
        with open_output(new, path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None
    finally:
        new.unlink(missing_ok=True)


def open_output(path: Path, asked: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise BadInput(f"cannot write `{asked}`: {error.strerror}") from None
