"""Exports a run: outcomes, attempts, pass@k or exchanges as JSON Lines or CSV, or a format of another tool.

It streams, holds at most one exchange, and reads only the run directory. The other modules of this package
write one format each; tables for the terminal are in the CLI.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import asdict

from ..core.errors import BadInput
from ..core.exchange import Exchange
from ..core.records import ModelUsage, PhaseTimes, Verdict
from ..core.summary import PassRate
from ..ledger.attempt_files import read_answer_json
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.durable_files import open_atomic_file, write_json
from ..ledger.exchanges import read_exchanges
from ..ledger.reader import LedgerReader
from ..ledger.rows import AttemptRow, OutcomeRow
from .atif import write_trajectories
from .harbor import write_job
from .openai import write_conversations
from .openhands import write_openhands
from .samples import ExportOmissions
from .swebench import count_patchless, make_swebench_report, write_predictions

KINDS = ("outcomes", "attempts", "pass-at-k", "exchanges", "trajectories")
WHOLE_RUN = "run"  # the format holds the whole run
FORMATS = {  # format -> the kinds that it can hold; the first is the default
    "jsonl": ("outcomes", "attempts", "pass-at-k", "exchanges"),
    "csv": ("outcomes", "attempts", "pass-at-k"),
    "openai-jsonl": ("trajectories",),
    "atif": ("trajectories",),
    "openhands": (WHOLE_RUN,),
    "swebench": (WHOLE_RUN,),
    "harbor": (WHOLE_RUN,),
}
FILE_FORMATS = ("jsonl", "csv", "openai-jsonl", "swebench")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets execute a cell that begins so


def export_run(
    path: Path | str, what: str | None, format: str, out: BinaryIO | Path, *, everything: bool = False
) -> str:
    """Write `what` of the run to `out`; return a sentence about omissions, empty if there are none.

    `out` is a file, or for `DIRECTORY_FORMATS` a directory. `everything`: with `openai-jsonl`, write every
    attempt and not only chosen attempts that passed.
    """
    what = _check_kind(what, format, everything)
    if format not in (DIRECTORY_FORMATS if isinstance(out, Path) else FILE_FORMATS):
        raise BadInput(f"`{format}` is written to a {'file' if isinstance(out, Path) else 'directory'}")
    with LedgerReader(path) as reader:
        omitted = ExportOmissions(reader)
        if isinstance(out, Path):
            DIRECTORY_FORMATS[format](reader, out, omitted)
        elif format == "swebench":
            _write_predictions(reader, out, omitted)
        elif what == "trajectories":
            write_conversations(reader, everything, out, omitted)
        elif what == "exchanges":
            _write_exchanges(reader, out, omitted)
        else:
            _write_rows(reader, what, format, out)
        return omitted.description


def _write_swebench(reader: LedgerReader, into: Path, omitted: ExportOmissions) -> None:
    with open_atomic_file(into / "predictions.jsonl") as predictions:
        _write_predictions(reader, predictions, omitted)
    write_json(into / "report.json", make_swebench_report(reader))


def _write_predictions(reader: LedgerReader, out: BinaryIO, omitted: ExportOmissions) -> None:
    omitted.patches = write_predictions(reader, out)
    omitted.patchless = count_patchless(reader)


DIRECTORY_FORMATS: dict[str, Callable[[LedgerReader, Path, ExportOmissions], object]] = {
    "atif": write_trajectories,
    "openhands": write_openhands,
    "swebench": _write_swebench,
    "harbor": write_job,
}


def _check_kind(what: str | None, format: str, everything: bool) -> str:
    if format not in FORMATS:
        raise BadInput(f"unknown format: `{format}`", hint=f"one of {', '.join(FORMATS)}")
    if everything and format != "openai-jsonl":
        raise BadInput("`--all` requires `--format openai-jsonl`; other formats include everything")
    if what is None:
        return FORMATS[format][0]
    if what not in KINDS:
        raise BadInput(f"unknown export: `{what}`", hint=f"one of {', '.join(KINDS)}")
    if what not in FORMATS[format]:
        fitting = [name for name, kinds in FORMATS.items() if what in kinds]
        raise BadInput(f"{what} cannot be written as `{format}`", hint=f"use `--format {fitting[0]}`")
    return what


def _write_rows(reader: LedgerReader, what: str, format: str, out: BinaryIO) -> None:
    attempts = (_make_attempt_row(reader.directory, row) for row in reader.attempts())
    rows, columns = {
        "outcomes": (map(_make_outcome_row, reader.outcomes()), OUTCOME_COLUMNS),
        "attempts": (attempts, ATTEMPT_COLUMNS),
        "pass-at-k": (map(asdict, reader.pass_rates()), PassRate.__struct_fields__),
    }[what]
    if format != "csv":
        out.writelines(_json(row) + b"\n" for row in rows)
        return
    writer = csv.writer(_Utf8Writer(out))
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_render_cell(row[column]) for column in columns])


def _write_exchanges(reader: LedgerReader, out: BinaryIO, omitted: ExportOmissions) -> None:
    blobs = BlobStore(reader.directory.blobs)
    for attempt in reader.attempts():
        if omitted.omits(attempt.attempt):
            continue
        for exchange in read_exchanges(reader.directory, attempt.attempt):
            _write_exchange(attempt, exchange, blobs, out)


def _write_exchange(attempt: AttemptRow, exchange: Exchange, blobs: BlobStore, out: BinaryIO) -> None:
    """Write one line in pieces: a request can be too large to hold twice."""
    start = {
        "instance": attempt.instance,
        "sample": attempt.sample,
        "attempt": attempt.attempt,
        "number": exchange.number,
        "parent": exchange.parent,
        "keep": exchange.keep,
        "dialect": exchange.dialect,
        "streamed": exchange.streamed,
        "status": exchange.status,
        "error": exchange.error,
        "started": exchange.started,
        "seconds": exchange.seconds,
        "usage": _flatten_usage(exchange.usage),
        "saved": _flatten_usage(exchange.saved),
    }
    out.write(_json(start)[:-1] + b',"append":[')
    for place, message in enumerate(exchange.append):
        out.write(b"," if place else b"")
        out.write(_render_line(message, blobs))
    for key, raw in ((b'],"head":', exchange.head), (b',"reply":', exchange.reply)):
        out.write(key)
        out.write(b"null" if raw is None else _render_line(raw, blobs))
    out.write(b"}\n")


def _render_line(raw: msgspec.Raw, blobs: BlobStore) -> bytes:
    """Return the value with its media, on one line: a line break in JSON is between tokens, like a space."""
    return resolve_references(bytes(raw), blobs).translate(_NO_BREAKS)


def _make_outcome_row(row: OutcomeRow) -> dict[str, Any]:
    own = asdict(row)
    spent = own.pop("spent")
    return {
        **own,
        **_flatten_usage(own.pop("usage")),
        **asdict(own.pop("times")),
        "total_cost": spent.cost,
    }


def _make_attempt_row(directory: RunDirectory, row: AttemptRow) -> dict[str, Any]:
    own = asdict(row)
    verdict = own.pop("verdict") or Verdict(attempt=row.attempt, token=row.token)
    failure, grade = verdict.failure, verdict.grade
    return {
        **own,
        "where": failure.where if failure else None,
        "phase": failure.phase if failure else None,
        "failure_kind": failure.kind if failure else None,
        "failure": failure.message if failure else "",
        "hint": failure.hint if failure else "",
        "passed": grade.passed if grade else None,
        "score": grade.score if grade else None,
        "detail": grade.detail if grade else "",
        "metrics": grade.metrics if grade else {},
        "answer": read_answer_json(directory, verdict),
        "salvage": verdict.salvage.name if verdict.salvage else None,
        "exchanges": verdict.exchanges,
        "peak_memory": verdict.peak_memory,
        **_flatten_usage(verdict.usage),
        **{f"saved_{name}": getattr(verdict.replayed_usage, name) for name in _TOKEN_COLUMNS},
        **asdict(verdict.times),
    }


def _flatten_usage(usage: ModelUsage) -> dict[str, Any]:
    """Return the tokens and their cost in US dollars, null if unknown."""
    return {**{name: getattr(usage, name) for name in _TOKEN_COLUMNS}, "cost": usage.cost}


def _render_cell(value: Any) -> Any:
    if isinstance(value, dict):
        value = _json(value).decode()
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return "'" + value
    return value


class _Utf8Writer:
    """Encodes text as UTF-8, so that `csv` can write to a binary file."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        self._out.write(text.encode())


_TOKEN_COLUMNS = tuple(name for name in ModelUsage.__struct_fields__ if name not in ("nanodollars", "priced"))
_USAGE_COLUMNS = (*_TOKEN_COLUMNS, "cost")
OUTCOME_COLUMNS = (
    *(name for name in OutcomeRow.__struct_fields__ if name not in ("usage", "times", "spent")),
    *_USAGE_COLUMNS,
    *PhaseTimes.__struct_fields__,
    "total_cost",
)
ATTEMPT_COLUMNS = (
    *(name for name in AttemptRow.__struct_fields__ if name != "verdict"),
    *("where", "phase", "failure_kind", "failure", "hint", "passed", "score", "detail", "metrics"),
    *("answer", "salvage", "exchanges", "peak_memory"),
    *_USAGE_COLUMNS,
    *(f"saved_{name}" for name in _TOKEN_COLUMNS),
    *PhaseTimes.__struct_fields__,
)
_NO_BREAKS = bytes(ord(" ") if byte in b"\r\n" else byte for byte in range(256))
_json = msgspec.json.Encoder().encode
