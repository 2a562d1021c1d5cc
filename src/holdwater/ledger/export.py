"""A run as lines: outcomes, attempts or exchanges, as JSON Lines or CSV. Streams; holds one exchange at most.

It reads the ledger and nothing else; the tables that people read are in the CLI.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..core.errors import BadInput
from ..core.records import Exchange, Record, Times, Usage, Verdict
from .blobs import Blobs
from .exchanges import read_exchanges
from .media import resolve
from .reader import AttemptRow, OutcomeRow, Reader

KINDS = ("outcomes", "attempts", "exchanges")
FORMATS = ("jsonl", "csv")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is run by spreadsheets


def export(path: Path | str, what: str, format: str, out: BinaryIO) -> None:
    """Write `what` of the run to `out`."""
    if what not in KINDS:
        raise BadInput(f"unknown export: `{what}`", hint=f"one of {', '.join(KINDS)}")
    if format not in FORMATS:
        raise BadInput(f"unknown format: `{format}`", hint=f"one of {', '.join(FORMATS)}")
    if what == "exchanges" and format == "csv":
        raise BadInput("exchanges do not fit into CSV", hint="use `--format jsonl`")
    with Reader(path) as reader:
        if what == "exchanges":
            _write_exchanges(reader, out)
            return
        rows = map(_outcome, reader.outcomes()) if what == "outcomes" else map(_attempt, reader.attempts())
        if format == "csv":
            _write_csv(rows, OUTCOME_COLUMNS if what == "outcomes" else ATTEMPT_COLUMNS, out)
        else:
            _write_lines(rows, out)


def _write_lines(rows: Iterator[dict[str, Any]], out: BinaryIO) -> None:
    for row in rows:
        out.write(_json(row) + b"\n")


def _write_csv(rows: Iterator[dict[str, Any]], columns: tuple[str, ...], out: BinaryIO) -> None:
    writer = csv.writer(_Encoded(out))
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_cell(row[column]) for column in columns])


def _write_exchanges(reader: Reader, out: BinaryIO) -> None:
    blobs = Blobs(reader.directory.blobs)
    for attempt in reader.attempts():
        for exchange in read_exchanges(reader.directory, attempt.attempt):
            _write_exchange(attempt, exchange, blobs, out)


def _write_exchange(attempt: AttemptRow, exchange: Exchange, blobs: Blobs, out: BinaryIO) -> None:
    """One line, piece by piece: a request can be larger than what we want to hold twice."""
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
        "usage": _flat(exchange.usage),
    }
    out.write(_json(start)[:-1] + b',"append":[')
    for place, message in enumerate(exchange.append):
        out.write(b"," if place else b"")
        out.write(_one_line(message, blobs))
    for key, raw in ((b'],"head":', exchange.head), (b',"reply":', exchange.reply)):
        out.write(key)
        out.write(b"null" if raw is None else _one_line(raw, blobs))
    out.write(b"}\n")


def _one_line(raw: msgspec.Raw, blobs: Blobs) -> bytes:
    """Its media put back. A line break in JSON can only lie between tokens, so that a space says the same."""
    return resolve(bytes(raw), blobs).translate(_NO_BREAKS)


def _outcome(row: OutcomeRow) -> dict[str, Any]:
    own = _flat(row)
    return {**own, **_flat(own.pop("usage")), **_flat(own.pop("times"))}


def _attempt(row: AttemptRow) -> dict[str, Any]:
    own = _flat(row)
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
        "answer": verdict.answer,
        "salvage": verdict.salvage.name if verdict.salvage else None,
        "exchanges": verdict.exchanges,
        "peak_memory": verdict.peak_memory,
        **_flat(verdict.usage),
        **_flat(verdict.times),
    }


def _flat(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        value = _json(value).decode()
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return value


class _Encoded:
    """Text in, UTF-8 out: what `csv` needs to write to a binary file."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        self._out.write(text.encode())


_USED = (*Usage.__struct_fields__, *Times.__struct_fields__)
OUTCOME_COLUMNS = (*(name for name in OutcomeRow.__struct_fields__ if name not in ("usage", "times")), *_USED)
ATTEMPT_COLUMNS = (
    *(name for name in AttemptRow.__struct_fields__ if name != "verdict"),
    *("where", "phase", "failure_kind", "failure", "hint", "passed", "score", "detail", "metrics"),
    *("answer", "salvage", "exchanges", "peak_memory"),
    *_USED,
)
_NO_BREAKS = bytes(ord(" ") if byte in b"\r\n" else byte for byte in range(256))
_json = msgspec.json.Encoder().encode
