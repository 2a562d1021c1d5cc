"""Reads benchmark rows from a file or a dataset, one at a time, each with its position.

A spec names the file and the options: `swebench:rows.jsonl?template=prompt.j2&timeout=3600`. Workers receive
only the spec. Unused columns are not read. `__init__.py` turns rows into instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from msgspec import Meta

from ...core.errors import BadInput
from ...core.input_checks import explain_path
from ...core.records import Network, Record, check_id
from ..jsonl import explain_error, is_inside, read_lines
from . import reference
from .dataset import DatasetSource, find_dataset, read_dataset
from .script import has_markers

BATCH = 32  # rows of a Parquet file held in memory at once
EVAL_TYPES = ("pass_and_fail", "fail_only")


class BenchmarkKind(StrEnum):
    SWEBENCH = "swebench"  # the agent fixes the code
    SWT = "swt"  # the agent writes tests that reproduce the bug

    @property
    def display_name(self) -> str:
        return "SWT-bench" if self is BenchmarkKind.SWT else "SWE-bench"


KINDS = tuple(BenchmarkKind)
RowSource = Path | DatasetSource
PATH_OPTIONS = ("template", "repos", "assets")  # options that are paths on this machine


class SwebenchOptions(Record, frozen=True):
    path: str
    kind: BenchmarkKind = BenchmarkKind.SWEBENCH
    template: str | None = None  # path of a Jinja2 template for the instruction
    namespace: str = "swebench"  # registry namespace of the images
    image: str | None = None  # used for every row; `{id}` stands for the instance's id
    workdir: str = "/testbed"
    repos: str | None = None  # a directory with one git repository per instance, named by its id
    assets: str | None = None  # a directory `<instance>/<path>` with the binary files of test patches
    timeout: Annotated[float, Meta(gt=0)] = 1800.0  # seconds for the tests
    network: Network | None = None  # the network of grading; by default the agent's
    split: str | None = None  # of a dataset by name; `test` by default
    subset: str | None = None  # of a dataset by name: its configuration

    @property
    def dataset(self) -> DatasetSource | None:
        """The dataset, if the path is the name of one and not a file."""
        if (found := find_dataset(self.path)) is None:
            return None
        name, revision = found
        return DatasetSource(name=name, revision=revision, split=self.split or "test", subset=self.subset)

    @property
    def source(self) -> RowSource:
        return self.dataset or Path(self.path)

    @property
    def copied(self) -> bool:
        """Whether repositories are copied into the working directory of any kind of sandbox."""
        return self.repos is not None and not self.image


def parse_options(spec: str) -> SwebenchOptions:
    """Parse the options of a spec; raise BadInput that names the invalid one."""
    kind, path, given = _split_spec(spec)
    try:
        options = msgspec.convert({"path": path, "kind": kind, **given}, SwebenchOptions, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(f"`{name}`" for name in SwebenchOptions.__struct_fields__[2:])
        what, _, name = str(error).partition(" - at `$.")
        what = what.replace("Object contains unknown field", "unknown option:")
        text = f"`{name[:-1]}`: {what[0].lower()}{what[1:]}" if name else what
        raise BadInput(f"invalid option in `{spec[:200]}`: {text}", hint=f"known options: {known}") from None
    for option in ("split", "subset"):
        if getattr(options, option) is not None and options.dataset is None:
            raise BadInput(
                f"invalid option in `{spec[:200]}`: `{option}` is an option of a dataset by name",
                hint="for example `swebench:princeton-nlp/SWE-bench_Verified?split=test`",
            )
    if problem := explain_path(options.workdir):
        raise BadInput(f"invalid option in `{spec[:200]}`: `workdir` {problem}")
    return options


def make_absolute(spec: str) -> str:
    """Return the spec with absolute paths, so that it is valid from any directory."""
    kind, path, given = _split_spec(spec)
    given = {name: str(Path(v).absolute()) if name in PATH_OPTIONS else v for name, v in given.items()}
    place = path if find_dataset(path) else Path(path).absolute()
    return f"{kind}:{place}" + (f"?{urlencode(given, safe='/{}:')}" if given else "")


def _split_spec(spec: str) -> tuple[str, str, dict[str, str]]:
    kind, colon, rest = spec.partition(":")
    if not colon or kind not in KINDS:
        kind, rest = BenchmarkKind.SWEBENCH, spec
    path, _, query = rest.partition("?")
    try:
        return kind, path, dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise BadInput(
            f"invalid options: `?{query[:200]}`", hint="options look like `?template=prompt.j2&timeout=3600`"
        ) from None


class SwebenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """The columns that we use. The last four exist since version 5 of the benchmark."""

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
    parser: str | None = None  # an alias of `log_parser`
    eval_type: str | None = None

    def check(self, parsers: frozenset[str]) -> None:
        """Raise a ValueError that names the field if the row cannot be graded."""
        check_id(self.instance_id)
        _ = self.images
        for name in self.to_grading_data()["assets"]:
            if not is_inside(name):
                raise ValueError(f"field `image_assets`: path leaves the repository: {name[:200]!r}")
        if not self.eval_script:
            reference.check_classic(self.repo, str(self.version or ""))
            return
        if not has_markers(self.eval_script):
            raise ValueError("field `eval_script`: the markers around the test output are missing")
        if (name := self.log_parser or self.parser or "") not in parsers:
            raise ValueError(f"field `log_parser`: unknown to swebench {reference.version()}: `{name[:80]}`")
        if self.eval_type not in (*EVAL_TYPES, None):
            raise ValueError(
                f"field `eval_type`: one of {', '.join(EVAL_TYPES)}, not `{self.eval_type[:80]}`"
            )

    def to_grading_data(self) -> dict[str, Any]:
        """Return the data that grading needs."""
        return {
            "repo": self.repo,
            "version": str(self.version or ""),
            "base_commit": self.base_commit,
            "patch": self.patch or "",
            "test_patch": self.test_patch or "",
            "FAIL_TO_PASS": parse_tests("FAIL_TO_PASS", self.FAIL_TO_PASS),
            "PASS_TO_PASS": parse_tests("PASS_TO_PASS", self.PASS_TO_PASS or []),
            "eval_script": self.eval_script,
            "log_parser": self.log_parser or self.parser,
            "eval_type": self.eval_type,
            "assets": [
                a["path"] for key in ("test_patch", "patch") for a in self._list_assets(key) if a.get("path")
            ],
        }

    @property
    def images(self) -> list[str]:
        """The URLs of the images in the problem statement."""
        return [
            a if isinstance(a, str) else str(a.get("url", "")) for a in self._list_assets("problem_statement")
        ]

    def _list_assets(self, key: str) -> list[Any]:
        found: Any = self.image_assets or {}
        if isinstance(found, str):
            found = _parse_json("image_assets", found)
        listed = found.get(key) if isinstance(found, dict) else None
        return listed if isinstance(listed, list) else []


def read_rows(source: RowSource) -> Iterator[tuple[str, SwebenchRow]]:
    """Yield each row with its position; raise BadInput that names the position and the invalid field."""
    for place, make in _read_raw(source):
        try:
            yield place, make()
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise BadInput(f"{place}: {explain_error(error)}") from None


def check_rows(source: RowSource, check: Callable[[SwebenchRow], None]) -> int:
    """Check that every row is valid and every id is unique; return the number of rows."""
    seen: dict[str, str] = {}  # id -> position; one entry per row
    for place, row in read_rows(source):
        try:
            check(row)
        except ValueError as error:
            raise BadInput(f"{place}: {explain_error(error)}") from None
        if row.instance_id in seen:
            raise BadInput(f"duplicate id `{row.instance_id}`: {seen[row.instance_id]} and {place}")
        seen[row.instance_id] = place
    return len(seen)


def recognised(path: Path) -> bool:
    """Return whether the first row of this JSON Lines file is a SWE-bench row."""
    try:
        _, first = next(read_lines(path))
        return {"instance_id", "base_commit"} <= msgspec.json.decode(
            first, type=dict[str, msgspec.Raw]
        ).keys()
    except (BadInput, StopIteration, msgspec.MsgspecError, RecursionError):
        return False


def parse_tests(field: str, given: str | list[str]) -> list[str]:
    """Return test ids from a list, or from a list encoded as JSON."""
    found = _parse_json(field, given) if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError(f"field `{field}`: expected a list of test ids, or one as JSON")
    return found


def _read_raw(source: RowSource) -> Iterator[tuple[str, Callable[[], SwebenchRow]]]:
    if isinstance(source, Path):
        yield from _read_file(source)
        return
    columns = SwebenchRow.__struct_fields__
    for number, line in enumerate(read_dataset(source, columns), start=1):
        yield f"{source.place}: row {number}", partial(_ROWS.decode, line)


def _read_file(path: Path) -> Iterator[tuple[str, Callable[[], SwebenchRow]]]:
    match path.suffix:
        case ".jsonl":
            for number, line in read_lines(path):
                yield f"{path.name}:{number}", partial(_ROWS.decode, line)
        case ".json":
            for number, raw in enumerate(_read_list(path), start=1):
                yield f"{path.name}: row {number}", partial(_ROWS.decode, raw)
        case ".parquet":
            for number, row in enumerate(_read_parquet(path), start=1):
                yield f"{path.name}: row {number}", partial(msgspec.convert, row, SwebenchRow)
        case _:
            raise BadInput(
                f"not a file of rows: `{path}`", hint="supported formats: `.jsonl`, `.json` and `.parquet`"
            )


def _read_list(path: Path) -> list[msgspec.Raw]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{path.name}: {explain_error(error)}", hint="expected a list of rows") from None
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None


def _read_parquet(path: Path) -> Iterator[dict[str, Any]]:
    parquet = reference.import_extra("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            wanted = [name for name in file.schema_arrow.names if name in SwebenchRow.__struct_fields__]
            for batch in file.iter_batches(batch_size=BATCH, columns=wanted):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise BadInput(f"cannot read `{path}`: {error}") from None


def _parse_json(field: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"field `{field}`: {explain_error(error)}") from None


_ROWS = msgspec.json.Decoder(SwebenchRow)  # made at import: msgspec crashes when two threads make one at once
