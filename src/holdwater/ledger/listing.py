"""Lists the samples of a run for people: filtered, sorted, and a page at a time, also among a million rows.

A page begins after a cursor, the sorted value and the key of the last row, so that a deep page costs as much
as the first one. A ledger of an older version has no figures: its rows can be listed, but not sorted by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.errors import BadInput
from ..core.records import Record
from .reader import LedgerReader
from .schema import ANSWER_VERSION, FIGURES_VERSION

OPEN = "open"  # the kind of a sample without an outcome
LONGEST_PATTERN = 200
# The name of a sort order -> its expression. Rows without a value come first, or last in reverse.
SORTS = {
    "planned": "",
    "name": "i.name",
    "score": "coalesce(o.score, -1e300)",
    "closed": "coalesce(o.closed, 0.0)",
    "time": "coalesce(f.seconds, 0.0)",
    "turns": "coalesce(f.exchanges, 0)",
    "tokens": "coalesce(f.input_tokens + f.output_tokens, 0)",
    "cost": "coalesce(f.nanodollars, 0)",
    "memory": "coalesce(f.peak_memory, 0)",
    "tries": "coalesce(a.number, 0)",
}
FIGURE_SORTS = ("time", "tokens", "cost", "memory")


class SampleFilter(Record, frozen=True):
    """Selects samples and their order."""

    kind: str = ""  # `passed`, `failed`, the place of a failure, or `open`
    failure: str = ""  # the failure's kind, such as `timeout`
    name: str = ""  # part of the instance's id
    text: str = ""  # part of the failure's message, or of the grade's
    place: str = ""  # where it failed, also if the outcome counts as failed
    tag: str = ""  # of the instance
    sort: str = "planned"
    descending: bool = False

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise BadInput(f"unknown sort order: `{self.sort[:100]}`", f"one of {', '.join(SORTS)}")


class ListedSample(NamedTuple):
    """One row of a list: a sample with an outcome, or an instance without one."""

    row: int  # the instance's row
    instance: str
    sample: int
    kind: str
    score: float | None
    place: str | None
    attempt: int | None
    closed: float | None
    turns: int | None
    tries: int | None
    failure: str | None
    input_tokens: int | None
    output_tokens: int | None
    nanodollars: int | None
    seconds: float | None
    peak_memory: int | None
    message: str | None
    position: Any  # the value by which it is sorted

    @property
    def cursor(self) -> str:
        return msgspec.json.encode([self.position, self.row, self.sample]).decode()


class SampleList:
    """The samples of one run that pass a filter, in its order."""

    def __init__(self, reader: LedgerReader, wanted: SampleFilter) -> None:
        self._reader = reader
        self._wanted = wanted
        self.has_figures = reader.version >= FIGURES_VERSION
        if wanted.sort in FIGURE_SORTS and not self.has_figures:
            raise BadInput(
                f"this run has no column for `{wanted.sort}`: it was written by an older holdwater",
                "`holdwater resume` adds the columns",
            )
        if wanted.tag and reader.version < ANSWER_VERSION:
            raise BadInput(
                "this run has no table of tags: it was written by an older holdwater",
                "`holdwater resume` adds it",
            )

    def read_page(self, size: int, after: str = "", *, backwards: bool = False) -> list[ListedSample]:
        """Return at most `size` rows after a cursor, or before it, in the order of the list."""
        down = self._wanted.descending != backwards
        keys = self._list_keys()
        where, arguments = self._make_conditions()
        if after:
            where.append(f"({', '.join(keys)}) {'<' if down else '>'} ({', '.join('?' * len(keys))})")
            arguments += _parse_cursor(after)[-len(keys) :]
        order = ", ".join(f"{key} DESC" if down else key for key in keys)
        query = f"{self._select()} WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?"
        rows = [ListedSample(*row) for row in self._reader.rows(query, (*arguments, size))]
        return rows[::-1] if backwards else rows

    def find(self, row: int, sample: int) -> ListedSample | None:
        """Return one row, whether or not it passes the filter."""
        query = f"{self._select()} WHERE i.id = ? AND coalesce(o.sample, 0) = ?"
        found = self._reader.rows(query, (row, sample))
        return ListedSample(*found[0]) if found else None

    def count(self) -> int:
        """Return the number of rows that pass the filter."""
        where, arguments = self._make_conditions()
        tables = _TABLES if self._wanted.failure or self._wanted.text else _OUTCOMES  # fewer are faster
        query = f"SELECT count(*) {tables} WHERE {' AND '.join(where)}"
        return int(self._reader.rows(query, tuple(arguments))[0][0])

    def _list_keys(self) -> list[str]:
        key = SORTS[self._wanted.sort]
        return [*([key] if key else []), "i.id", "coalesce(o.sample, 0)"]

    def _select(self) -> str:
        figures = ", ".join(
            f"f.{name}" if self.has_figures else f"NULL AS {name}"
            for name in ("input_tokens", "output_tokens", "nanodollars", "seconds", "peak_memory", "message")
        )
        return (
            "SELECT i.id, i.name, coalesce(o.sample, 0), coalesce(o.kind, 'open'), o.score, o.place,"
            f" o.attempt, o.closed, f.exchanges, a.number, a.failure, {figures},"
            f" {SORTS[self._wanted.sort] or 'NULL'} {_TABLES}"
        )

    def _make_conditions(self) -> tuple[list[str], list[Any]]:
        wanted, where, arguments = self._wanted, ["true"], list[Any]()
        equal = {
            "coalesce(o.kind, 'open')": wanted.kind,
            "a.failure": wanted.failure,
            "o.place": wanted.place,
        }
        contained = {"i.name": wanted.name, "f.message" if self.has_figures else "''": wanted.text}
        for column, value in equal.items():
            if value:
                where.append(f"{column} = ?")
                arguments.append(value)
        for column, part in contained.items():
            if part:
                where.append(f"instr(lower({column}), lower(?)) > 0")
                arguments.append(part[:LONGEST_PATTERN])
        if wanted.tag:
            where.append("i.id IN (SELECT instance FROM tag WHERE tag = ?)")
            arguments.append(wanted.tag)
        return where, arguments


def count_failures(reader: LedgerReader) -> list[tuple[str, str, int]]:
    """Return the failures of samples by place and kind, the most frequent first."""
    query = (
        "SELECT o.place, coalesce(a.failure, ''), count(*) FROM outcome o JOIN attempt a ON a.id = o.attempt"
        " WHERE o.place IS NOT NULL GROUP BY 1, 2 ORDER BY 3 DESC LIMIT 100"
    )
    return [(place, kind, count) for place, kind, count in reader.rows(query)]


def list_extremes(reader: LedgerReader, sort: str, most: int) -> list[ListedSample]:
    """Return the closed samples that are highest in a sort order, as a list in that order begins.

    It reads outcomes and attempts alone, which takes a fraction of the time of the list.
    """
    samples = SampleList(reader, SampleFilter(sort=sort, descending=True))
    query = (
        "SELECT o.instance, o.sample FROM outcome o JOIN attempt a ON a.id = o.attempt"
        " LEFT JOIN attempt f ON f.id = coalesce(a.regrades, a.id)"
        f" ORDER BY {SORTS[sort]} DESC, 1 DESC, 2 DESC LIMIT ?"
    )
    rows = [samples.find(instance, sample) for instance, sample in reader.rows(query, (most,))]
    return [row for row in rows if row is not None and row.position]


def list_tags(reader: LedgerReader, most: int = 200) -> list[str]:
    """Return the tags of the run's instances."""
    if reader.version < ANSWER_VERSION:
        return []
    return [tag for (tag,) in reader.rows(_TAGS, (most,))]


def list_places(reader: LedgerReader) -> list[str]:
    """Return the places at which samples failed."""
    query = "SELECT DISTINCT place FROM outcome WHERE place IS NOT NULL ORDER BY 1"
    return [place for (place,) in reader.rows(query)]


def list_kinds(reader: LedgerReader, most: int) -> list[tuple[str, int, str]]:
    """Return name, sample and kind of the first samples, in the order of planning."""
    query = (
        "SELECT i.name, coalesce(o.sample, 0), coalesce(o.kind, 'open')"
        " FROM instance i LEFT JOIN outcome o ON o.instance = i.id ORDER BY i.id, o.sample LIMIT ?"
    )
    return [(name, sample, kind) for name, sample, kind in reader.rows(query, (most,))]


def list_lengths(reader: LedgerReader) -> Iterator[tuple[str, str, int]]:
    """Yield name, kind and number of turns of every sample; the turns are those of all its attempts."""
    query = (
        "SELECT i.name, coalesce(o.kind, 'open'), coalesce(sum(a.exchanges), 0),"
        " i.id, i.id, coalesce(a.sample, 0) AS part"
        " FROM instance i LEFT JOIN attempt a ON a.instance = i.id"
        " LEFT JOIN outcome o ON o.instance = i.id AND o.sample = a.sample"
        " WHERE i.id >= ? AND (i.id, coalesce(a.sample, 0)) > (?, ?)"
        " GROUP BY i.id, a.sample ORDER BY i.id, part LIMIT ?"
    )
    for name, kind, turns, *_ in reader.paged(query, (0, 0, -1), slice(3, 6)):
        yield name, kind, turns


class RunningAttempt(NamedTuple):
    """An attempt that ran at some moment."""

    instance: str
    sample: int
    number: int
    started: float
    settled: float | None
    kind: str | None


def list_running(reader: LedgerReader, at: float, most: int = 200) -> list[RunningAttempt]:
    """Return the attempts that ran at a moment, the oldest first."""
    query = (
        "SELECT i.name, a.sample, a.number, a.started, a.settled, a.kind FROM attempt a"
        " JOIN instance i ON i.id = a.instance"
        " WHERE a.started <= ? AND (a.settled >= ? OR a.settled IS NULL) ORDER BY a.started LIMIT ?"
    )
    return [RunningAttempt(*row) for row in reader.rows(query, (at, at, most))]


def list_marks(
    reader: LedgerReader, kinds: Mapping[str, str], most: int = 500
) -> list[tuple[float, str, str]]:
    """Return time, label and message of events of some kinds, of resumes, and of sandboxes without memory."""
    places = ", ".join("?" * len(kinds))
    query = f"SELECT at, kind, message FROM event WHERE kind IN ({places}) ORDER BY id LIMIT ?"
    events = [(at, kinds[kind], message) for at, kind, message in reader.rows(query, (*kinds, most))]
    return [*events, *reader.rows(_RESUMES, (most,)), *reader.rows(_OUT_OF_MEMORY, (most,))]


def _parse_cursor(text: str) -> list[Any]:
    try:
        cursor = msgspec.json.decode(text, type=tuple[str | float | int | None, int, int])
    except msgspec.MsgspecError:
        raise BadInput(f"invalid position in the list: `{text[:100]}`") from None
    return list(cursor)


# Steps from tag to tag through the primary key: `SELECT DISTINCT` would read every row.
_TAGS = """
    WITH RECURSIVE known (tag) AS (
        SELECT min(tag) FROM tag
        UNION ALL
        SELECT (SELECT min(tag) FROM tag WHERE tag > known.tag) FROM known WHERE known.tag IS NOT NULL
    ) SELECT tag FROM known WHERE tag IS NOT NULL LIMIT ?
"""
_RESUMES = "SELECT started, 'resumed', '' FROM conductor WHERE token > 1 ORDER BY token LIMIT ?"
_OUT_OF_MEMORY = """
    SELECT a.settled, 'OOM', i.name FROM attempt a JOIN instance i ON i.id = a.instance
    WHERE a.place = 'resource' AND a.failure = 'memory' ORDER BY a.id LIMIT ?
"""
_OUTCOMES = "FROM instance i LEFT JOIN outcome o ON o.instance = i.id"
_TABLES = (
    f"{_OUTCOMES} LEFT JOIN attempt a ON a.id = o.attempt"
    " LEFT JOIN attempt f ON f.id = coalesce(a.regrades, a.id)"
)
