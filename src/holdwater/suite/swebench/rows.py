"""The rows of a benchmark, from JSON Lines, JSON or Parquet, one at a time; each with its place in the file.

What is done with them is in `__init__.py`. Columns that nobody needs are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ...core.errors import BadInput
from ...core.records import check_id
from ..jsonl import lines
from . import reference
from .script import markers_in

BATCH = 32  # rows of a Parquet file in memory
EVAL_TYPES = ("pass_and_fail", "fail_only")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What we need of a row. The last four are there since the fifth version of the benchmark."""

    instance_id: str
    repo: str
    base_commit: str
    FAIL_TO_PASS: str | list[str]
    PASS_TO_PASS: str | list[str] | None = None
    problem_statement: str | None = None
    hints_text: str | None = None
    patch: str | None = None
    test_patch: str | None = None
    version: str | float | None = None
    image_assets: str | dict[str, Any] | None = None
    image: str | None = None
    eval_script: str | None = None
    log_parser: str | None = None
    parser: str | None = None  # another name for it
    eval_type: str | None = None

    def check(self, parsers: frozenset[str]) -> None:
        """Raise a ValueError that names the field, if it cannot be graded."""
        check_id(self.instance_id)
        _ = self.images
        for name in self.needed()["assets"]:
            if not inside(name):
                raise ValueError(f"field `image_assets`: path leaves the repository: {name[:200]!r}")
        if not self.eval_script:
            reference.check_classic(self.repo, str(self.version or ""))
            return
        if not markers_in(self.eval_script):
            raise ValueError("field `eval_script`: the markers around the test output are missing")
        if (name := self.log_parser or self.parser or "") not in parsers:
            raise ValueError(f"field `log_parser`: unknown to swebench {reference.version()}: `{name[:80]}`")
        if self.eval_type not in (*EVAL_TYPES, None):
            raise ValueError(
                f"field `eval_type`: one of {', '.join(EVAL_TYPES)}, not `{self.eval_type[:80]}`"
            )

    def needed(self) -> dict[str, Any]:
        """What grading needs, as plain data."""
        return {
            "repo": self.repo,
            "version": str(self.version or ""),
            "base_commit": self.base_commit,
            "patch": self.patch or "",
            "test_patch": self.test_patch or "",
            "FAIL_TO_PASS": tests("FAIL_TO_PASS", self.FAIL_TO_PASS),
            "PASS_TO_PASS": tests("PASS_TO_PASS", self.PASS_TO_PASS or []),
            "eval_script": self.eval_script,
            "log_parser": self.log_parser or self.parser,
            "eval_type": self.eval_type,
            "assets": [
                a["path"] for key in ("test_patch", "patch") for a in self._assets(key) if a.get("path")
            ],
        }

    @property
    def images(self) -> list[str]:
        """The images of the problem statement, by their URLs."""
        return [a if isinstance(a, str) else str(a.get("url", "")) for a in self._assets("problem_statement")]

    def _assets(self, key: str) -> list[Any]:
        found: Any = self.image_assets or {}
        if isinstance(found, str):
            found = _json("image_assets", found)
        listed = found.get(key) if isinstance(found, dict) else None
        return listed if isinstance(listed, list) else []


def rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Each row and its place; BadInput names the place and the field that are wrong."""
    for place, make in _raw(path):
        try:
            yield place, make()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadInput(f"{place}: {explained(error)}") from None


def check_rows(path: Path, check: Callable[[Row], None]) -> int:
    """Every row is valid and no id is there twice; how many there are."""
    seen: dict[str, str] = {}  # id -> place: as many as there are rows
    for place, row in rows(path):
        try:
            check(row)
        except ValueError as error:
            raise BadInput(f"{place}: {explained(error)}") from None
        if row.instance_id in seen:
            raise BadInput(f"duplicate id `{row.instance_id}`: {seen[row.instance_id]} and {place}")
        seen[row.instance_id] = place
    return len(seen)


def recognised(path: Path) -> bool:
    """Whether the first row of this JSON Lines file is one of ours."""
    try:
        _, first = next(lines(path))
        return {"instance_id", "base_commit"} <= msgspec.json.decode(
            first, type=dict[str, msgspec.Raw]
        ).keys()
    except (BadInput, StopIteration, msgspec.MsgspecError, RecursionError):
        return False


def tests(field: str, given: str | list[str]) -> list[str]:
    """Test ids: a list, or one written as JSON."""
    found = _json(field, given) if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"field `{field}`: expected a list of test ids, or one as JSON")
    return found


def inside(path: str) -> bool:
    """Whether a relative path stays below where it begins."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def explained(error: Exception) -> str:
    """msgspec's message in our words: ``field `repo`: missing``."""
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    text = str(error).removeprefix("JSON is malformed: ")
    if not isinstance(error, msgspec.ValidationError):
        return f"not valid JSON: {text}" if isinstance(error, msgspec.DecodeError) else text
    if match := re.fullmatch(r"Object missing required field `(.*)`.*", text):
        return f"field `{match[1]}`: missing"
    what, _, place = text.partition(" - at `$.")
    told = what[:1].lower() + what[1:].replace("`", "")
    return f"field `{place.rstrip('`')}`: {told}" if place else told


def _raw(path: Path) -> Iterator[tuple[str, Callable[[], Row]]]:
    match path.suffix:
        case ".jsonl":
            for number, line in lines(path):
                yield f"{path.name}:{number}", partial(_ROWS.decode, line)
        case ".json":
            for number, raw in enumerate(_listed(path), start=1):
                yield f"{path.name}: row {number}", partial(_ROWS.decode, raw)
        case ".parquet":
            for number, row in enumerate(_parquet(path), start=1):
                yield f"{path.name}: row {number}", partial(msgspec.convert, row, Row)
        case _:
            raise BadInput(f"not a file of rows: `{path}`", hint="`.jsonl`, `.json` and `.parquet` are read")


def _listed(path: Path) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path.name}: {explained(error)}", hint="expected a list of rows") from None
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    parquet = reference.needed("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in Row.__struct_fields__]
            for batch in file.iter_batches(batch_size=BATCH, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise BadInput(f"cannot read `{path}`: {error}") from None


def _json(field: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"field `{field}`: {explained(error)}") from None


_ROWS = msgspec.json.Decoder(Row)  # made at import: msgspec crashes when two threads do it at once
