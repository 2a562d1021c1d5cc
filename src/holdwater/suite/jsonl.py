"""Reads a suite from a JSON Lines file: one instance per line, graded by its own command.

Rows are decoded one at a time. `check` first validates the whole file, with 8 bytes of memory per row. Other
formats use the same checks of values: a suite may come from an untrusted source, and may copy its own files
into a sandbox, but no other file of this machine.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..core.authoring import Suite
from ..core.errors import BadInput
from ..core.records import GiB, Instance, LimitOverrides, MiB, Record
from ..plugin import find_close_name
from .grading import EXPECTED, command_grade

LONGEST_LINE = 64 * MiB
BOM = b"\xef\xbb\xbf"
BUCKETS = 256  # hashes are sorted bucket by bucket, so sorting never copies all of them at once
MOST_SUSPECTS = 1000  # maximum number of repeated hashes that the second pass compares

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(gt=0)]
Text = Annotated[str, Meta(min_length=1)]


class RowLimits(Record, frozen=True):
    """The `limits` object of a row; sizes may be written as `512MiB`."""

    setup: Seconds | None = None
    acting: Seconds | None = None
    working: Seconds | None = None
    grading: Seconds | None = None
    memory: Count | str | None = None
    disk: Count | str | None = None
    pids: Count | None = None
    output: Count | str | None = None
    cpus: Annotated[float, Meta(gt=0)] | None = None
    cpu_seconds: Seconds | None = None


class SuiteRow(Record, frozen=True):
    """One decoded line of the file."""

    id: str
    grade: Text
    instruction: str = ""
    files: dict[str, str] = msgspec.field(default_factory=dict)
    tests: dict[str, str] = msgspec.field(default_factory=dict)  # visible to `grade` only
    expected: str | None = None  # the output that `grade` must print; it never enters the sandbox
    directory: Text | None = None  # relative to the file's directory, at or below it
    setup: Text | None = None
    solution: Text | None = None
    limits: RowLimits = RowLimits()
    data: dict[str, Any] = msgspec.field(default_factory=dict)


_ROWS = msgspec.json.Decoder(SuiteRow)  # made at import: msgspec crashes when two threads make one at once


def jsonl(path: Path | str) -> Suite:
    """Return the suite in the file `path`. Its `size` is known after `check` has run."""
    path = Path(path).absolute()
    if not path.is_file():
        raise BadInput(f"no such file: `{path}`")

    def check() -> None:
        msgspec.structs.force_setattr(suite, "size", _check(path))

    suite = Suite(
        name=path.stem,
        instances=lambda: (instance for _, instance in _read_rows(path)),
        grade=command_grade,
        check=check,
        description=f"the rows of `{path.name}`",
    )
    return suite


def _check(path: Path) -> int:
    """Check that every row is valid and every id is unique; return the number of rows."""
    hashes = [array("q") for _ in range(BUCKETS)]
    for _, instance in _read_rows(path):
        number = hash(instance.id)
        hashes[number % BUCKETS].append(number)
    suspects = _find_repeated(hashes)
    if suspects:
        _refuse_duplicates(path, suspects)
    return sum(len(bucket) for bucket in hashes)


def _find_repeated(hashes: list[array[int]]) -> set[int]:
    repeated: set[int] = set()  # bounded by MOST_SUSPECTS plus one bucket
    for bucket in hashes:
        ordered = sorted(bucket)
        repeated.update(a for a, b in pairwise(ordered) if a == b)
        if len(repeated) >= MOST_SUSPECTS:
            break
    return repeated


def _refuse_duplicates(path: Path, suspects: set[int]) -> None:
    """Compare the ids themselves, because hashes may collide; name both lines of the first duplicate."""
    first: dict[str, int] = {}  # one id per suspect hash, plus ids that collide with one
    for line, instance in _read_rows(path):
        if hash(instance.id) not in suspects:
            continue
        if instance.id in first:
            places = f"{path.name}:{first[instance.id]} and {path.name}:{line}"
            raise BadInput(f"duplicate id `{instance.id}`: {places}")
        first[instance.id] = line


def _read_rows(path: Path) -> Iterator[tuple[int, Instance]]:
    decode = _ROWS.decode
    for number, line in read_lines(path):
        try:
            instance = _make_instance(decode(line), path.parent)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadInput(
                f"{path.name}:{number}: {explain_error(error)}", hint=_suggest_field(error)
            ) from None
        yield number, instance


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the non-blank lines with their line numbers; read no more than LONGEST_LINE bytes of a line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
                if len(line) > LONGEST_LINE:
                    raise BadInput(f"{path.name}:{number}: the line is longer than {LONGEST_LINE // MiB} MiB")
                text = _decode_line(line.removeprefix(BOM) if number == 1 else line, f"{path.name}:{number}")
                if text:
                    yield number, text
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None


def _decode_line(line: bytes, place: str) -> str:
    try:
        return line.strip().decode()
    except UnicodeDecodeError as error:
        raise BadInput(f"{place}: not valid UTF-8: byte {error.start + 1}") from None


def _make_instance(row: SuiteRow, base: Path) -> Instance:
    for field, place in (("files", "working directory"), ("tests", "tests' directory")):
        for path in getattr(row, field):
            if not is_inside(path):
                raise InvalidField(field, f"path leaves the {place}: {path[:200]!r}")
    directory = None if row.directory is None else base / row.directory
    if directory is not None and not directory.is_dir():
        raise InvalidField("directory", f"no such directory: `{directory}`")
    if directory is not None and leads_out(directory, base):
        raise InvalidField("directory", f"leads out of the suite's own directory: `{row.directory}`")
    return Instance(
        id=row.id,
        instruction=row.instruction,
        files=row.files,
        tests=row.tests,
        directory=None if directory is None else str(directory),
        setup=row.setup,
        grade=row.grade,
        solution=row.solution,
        data=row.data if row.expected is None else {**row.data, EXPECTED: row.expected},
        limits=_make_overrides(row.limits),
    )


def _make_overrides(limits: RowLimits) -> LimitOverrides:
    given = {f: v for f in limits.__struct_fields__ if (v := getattr(limits, f)) is not None}
    return LimitOverrides(
        **{field: _parse_bytes(field, v) if isinstance(v, str) else v for field, v in given.items()}
    )


def _parse_bytes(field: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]i?)?B?", text.strip(), re.ASCII | re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise InvalidField(f"limits.{field}", f"expected bytes or a size like `512MiB`, got `{text[:80]}`")
    return size


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1024, "mi": MiB, "gi": GiB, "ti": 1024 * GiB}


def _suggest_field(error: Exception) -> str:
    """Return a hint for an unknown field of a row or of its limits; empty for any other error."""
    match = re.match(r"Object contains unknown field `([^`]*)`( - at)?", str(error))
    if match is None:
        return ""
    fields = (RowLimits if match[2] else SuiteRow).__struct_fields__
    near = find_close_name(match[1], fields)
    return f"did you mean `{near}`?" if near else f"known fields: {', '.join(f'`{name}`' for name in fields)}"


class InvalidField(ValueError):
    """A field has an invalid value; without a field, the whole file is invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field `{field}`: {problem}" if field else problem)


def leads_out(path: Path, root: Path) -> bool:
    """Return whether `path` (which need not exist) lies outside `root`; a loop of links counts as inside."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_inside(path: str) -> bool:
    """Return whether a path is relative and stays below its starting directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def explain_error(error: Exception) -> str:
    """Return msgspec's message in our format: ``field `limits.pids`: expected int, got str``."""
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    text = str(error).removeprefix("JSON is malformed: ")
    if not isinstance(error, msgspec.ValidationError):
        return f"not valid JSON: {text}" if isinstance(error, msgspec.DecodeError) else text
    what, _, place = text.partition(" - at `$")
    path = place.rstrip("`").lstrip(".").replace("[...]", "").replace("[", ".").replace("]", "")
    if match := re.fullmatch(r"Object (?:contains )?(missing|unknown)(?: required)? field `(.*)`", what):
        field = f"{path}.{match[2]}" if path else match[2]
        return f"field `{field}`: {match[1]}"
    what = what.replace(" | null`", "`").replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"field `{path}`: {what}" if path else what
