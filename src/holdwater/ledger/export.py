"""A run as lines: outcomes, attempts, pass@k or exchanges, as JSON Lines or CSV.

It streams, holds one exchange at most, and reads the ledger and nothing else. What other programs read is
written by `export_*.py`, one format each; the tables that people read are in the CLI.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..core.errors import BadInput
from ..core.pass_rates import PassRate
from ..core.records import Exchange, Record, Times, Usage, Verdict
from .blobs import Blobs
from .directory import RunDirectory
from .exchanges import read_exchanges
from .export_atif import write_trajectories
from .export_harbor import write_job
from .export_openai import write_conversations
from .export_openhands import write_openhands
from .export_swebench import count_patchless, report, write_predictions
from .files import answer_json
from .media import resolve
from .omitted import Omitted
from .reader import AttemptRow, OutcomeRow, Reader
from .whole import whole_file

KINDS = ("outcomes", "attempts", "pass-at-k", "exchanges", "trajectories")
RUN = "run"  # a format of its own for all there is
FORMATS = {  # format -> what can be written so, first what it is if nobody says
    "jsonl": ("outcomes", "attempts", "pass-at-k", "exchanges"),
    "csv": ("outcomes", "attempts", "pass-at-k"),
    "openai-jsonl": ("trajectories",),
    "atif": ("trajectories",),
    "openhands": (RUN,),
    "swebench": (RUN,),
    "harbor": (RUN,),
}
FILES = ("jsonl", "csv", "openai-jsonl", "swebench")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so is run by spreadsheets


def export(
    path: Path | str, what: str | None, format: str, out: BinaryIO | Path, *, everything: bool = False
) -> str:
    """Write `what` of the run to `out`, a file or for `DIRECTORIES` a directory; what is left out.

    `everything`: with `openai-jsonl`, every attempt and not only those that were chosen and passed.
    """
    what = _checked(what, format, everything)
    if format not in (DIRECTORIES if isinstance(out, Path) else FILES):
        raise BadInput(f"`{format}` is written to a {'file' if isinstance(out, Path) else 'directory'}")
    with Reader(path) as reader:
        omitted = Omitted(reader)
        if isinstance(out, Path):
            DIRECTORIES[format](reader, out, omitted)
        elif format == "swebench":
            _write_predictions(reader, out, omitted)
        elif what == "trajectories":
            write_conversations(reader, everything, out, omitted)
        elif what == "exchanges":
            _write_exchanges(reader, out, omitted)
        else:
            _write_rows(reader, what, format, out)
        return omitted.told


def _write_swebench(reader: Reader, into: Path, omitted: Omitted) -> None:
    with whole_file(into / "predictions.jsonl") as predictions:
        _write_predictions(reader, predictions, omitted)
    with whole_file(into / "report.json") as file:
        file.write(msgspec.json.format(_json(report(reader))) + b"\n")


def _write_predictions(reader: Reader, out: BinaryIO, omitted: Omitted) -> None:
    omitted.patches = write_predictions(reader, out)
    omitted.patchless = count_patchless(reader)


DIRECTORIES: dict[str, Callable[[Reader, Path, Omitted], object]] = {
    "atif": write_trajectories,
    "openhands": write_openhands,
    "swebench": _write_swebench,
    "harbor": write_job,
}


def _checked(what: str | None, format: str, everything: bool) -> str:
    if format not in FORMATS:
        raise BadInput(f"unknown format: `{format}`", hint=f"one of {', '.join(FORMATS)}")
    if everything and format != "openai-jsonl":
        raise BadInput("`--all` goes with `--format openai-jsonl`; the other formats have all there is")
    if what is None:
        return FORMATS[format][0]
    if what not in KINDS:
        raise BadInput(f"unknown export: `{what}`", hint=f"one of {', '.join(KINDS)}")
    if what not in FORMATS[format]:
        fitting = [name for name, kinds in FORMATS.items() if what in kinds]
        raise BadInput(f"{what} cannot be written as `{format}`", hint=f"use `--format {fitting[0]}`")
    return what


def _write_rows(reader: Reader, what: str, format: str, out: BinaryIO) -> None:
    attempts = (_attempt(reader.directory, row) for row in reader.attempts())
    rows, columns = {
        "outcomes": (map(_outcome, reader.outcomes()), OUTCOME_COLUMNS),
        "attempts": (attempts, ATTEMPT_COLUMNS),
        "pass-at-k": (map(_flat, reader.pass_rates()), PassRate.__struct_fields__),
    }[what]
    if format == "csv":
        _write_csv(rows, columns, out)
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


def _write_exchanges(reader: Reader, out: BinaryIO, omitted: Omitted) -> None:
    blobs = Blobs(reader.directory.blobs)
    for attempt in reader.attempts():
        if omitted.omits(attempt.attempt):
            continue
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
        "usage": _used(exchange.usage),
        "saved": _used(exchange.saved),
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
    spent = own.pop("spent")
    return {**own, **_used(own.pop("usage")), **_flat(own.pop("times")), "total_cost": spent.cost}


def _attempt(directory: RunDirectory, row: AttemptRow) -> dict[str, Any]:
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
        "answer": answer_json(directory, verdict),
        "salvage": verdict.salvage.name if verdict.salvage else None,
        "exchanges": verdict.exchanges,
        "peak_memory": verdict.peak_memory,
        **_used(verdict.usage),
        **dict(zip(_SAVED, (getattr(verdict.saved, name) for name in _TOKENS), strict=True)),
        **_flat(verdict.times),
    }


def _used(usage: Usage) -> dict[str, Any]:
    """Tokens, and what they cost in US dollars; null where that is unknown."""
    return {**{name: getattr(usage, name) for name in _TOKENS}, "cost": usage.cost}


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


_TOKENS = tuple(name for name in Usage.__struct_fields__ if name not in ("nanodollars", "priced"))
_USED = (*_TOKENS, "cost")
_SAVED = tuple(f"saved_{name}" for name in _TOKENS)
OUTCOME_COLUMNS = (
    *(name for name in OutcomeRow.__struct_fields__ if name not in ("usage", "times", "spent")),
    *_USED,
    *Times.__struct_fields__,
    "total_cost",
)
ATTEMPT_COLUMNS = (
    *(name for name in AttemptRow.__struct_fields__ if name != "verdict"),
    *("where", "phase", "failure_kind", "failure", "hint", "passed", "score", "detail", "metrics"),
    *("answer", "salvage", "exchanges", "peak_memory"),
    *_USED,
    *_SAVED,
    *Times.__struct_fields__,
)
_NO_BREAKS = bytes(ord(" ") if byte in b"\r\n" else byte for byte in range(256))
_json = msgspec.json.Encoder().encode
