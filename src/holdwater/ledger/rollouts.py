"""The rows behind trajectories: which attempt of which sample, how it ended, and whose order it belongs to.

Small and paged. What was said is in `nodes.py`; results for clients are made in `results.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from ..core.errors import BadInput, LedgerCorrupt
from ..core.records import Record, Where
from .reader import PAGE, Reader

OUTCOMES = ("passed", "failed", *Where)


class RolloutRow(Record, frozen=True):
    """An attempt that is over."""

    instance: str
    row: int  # the instance's row
    sample: int
    attempt: int
    kind: str
    score: float | None
    order: int | None  # None: nobody ordered it, it belongs to an ordinary run
    key: str | None
    member: int  # within its order, or of the samples of its instance


class Wanted(Record, frozen=True):
    """Which of them."""

    outcome: str | None = None
    only: tuple[str, ...] = ()  # patterns of instance ids
    attempts: Literal["chosen", "all"] = "chosen"

    def __post_init__(self) -> None:
        if self.outcome is not None and self.outcome not in OUTCOMES:
            raise BadInput(f"no such outcome: `{self.outcome}`", f"one of {', '.join(OUTCOMES)}")
        if self.attempts not in ("chosen", "all"):
            raise BadInput(f"`attempts` is `chosen` or `all`: `{self.attempts}`")

    def takes(self, row: RolloutRow) -> bool:
        return not self.only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in self.only)


def find_rollout(reader: Reader, instance: int, sample: int) -> RolloutRow:
    """What became of one sample."""
    query = f"{_none_ordered(reader)}{_CHOSEN} WHERE o.instance = ? AND o.sample = ?"
    for row in reader.rows(query, (instance, sample)):
        return RolloutRow(*row)
    raise LedgerCorrupt(f"sample {sample} of instance {instance} has no outcome")


def ended_attempt(reader: Reader, attempt: int) -> RolloutRow:
    """One attempt that is over."""
    for row in reader.rows(f"{_none_ordered(reader)}{_ENDED} WHERE o.attempt = ?", (attempt,)):
        return RolloutRow(*row)
    raise BadInput(f"no such attempt, or it is not over: {attempt}")


def rollouts(reader: Reader, wanted: Wanted) -> Iterator[RolloutRow]:
    """Samples in the order of planning, or attempts in the order in which they began."""
    if wanted.attempts == "chosen":
        return _paged(reader, wanted, f"{_CHOSEN} WHERE (o.instance, o.sample) > (:one, :two)", _PLANNED)
    return _paged(reader, wanted, _EVERY, _BEGUN)


def groups(reader: Reader, wanted: Wanted) -> Iterator[list[RolloutRow]]:
    """Samples that belong together, where all of them are over: an order's, or those of an instance."""
    if wanted.attempts != "chosen":
        raise BadInput("groups are made of chosen attempts", "leave out `attempts`")
    serves = not _none_ordered(reader) and reader.rows("SELECT 1 FROM orders LIMIT 1")
    query, by = (_ORDERED, _MEMBERS) if serves else (_COMPLETE, _PLANNED)
    rows = _paged(reader, wanted, query, by)
    for _, group in groupby(rows, key=lambda row: row.order or row.row):
        yield list(group)


def count(reader: Reader, wanted: Wanted) -> int:
    """How many `rollouts` gives now."""
    if wanted.only:
        return sum(1 for _ in rollouts(reader, wanted))
    chosen = "outcome WHERE true"
    every = "attempt WHERE settled IS NOT NULL AND regrades IS NULL"
    table = chosen if wanted.attempts == "chosen" else every
    query = f"SELECT count(*) FROM {table} AND (:kind IS NULL OR kind = :kind)"
    return int(reader.rows(query, {"kind": wanted.outcome})[0][0])


def _paged(
    reader: Reader, wanted: Wanted, query: str, by: tuple[str, tuple[int, int]]
) -> Iterator[RolloutRow]:
    columns, fields = by
    ordered = f"{_none_ordered(reader)}{query} AND (:kind IS NULL OR o.kind = :kind) ORDER BY {columns} LIMIT"
    about: dict[str, Any] = {"kind": wanted.outcome, "samples": reader.config.samples, "one": 0, "two": -1}
    while page := reader.rows(f"{ordered} {PAGE}", about):
        yield from filter(wanted.takes, (RolloutRow(*row) for row in page))
        about["one"], about["two"] = (page[-1][field] for field in fields)


def _none_ordered(reader: Reader) -> str:
    """What stands before a query: an older ledger has no orders and is read as it is."""
    return "" if reader.rows("SELECT 1 FROM sqlite_master WHERE name = 'rollout'") else _NONE_ORDERED


_NONE_ORDERED = (
    "WITH rollout (instance, sample, orders, member) AS (SELECT 0, 0, 0, 0 WHERE false),"
    " orders (id, key) AS (SELECT 0, '' WHERE false) "
)
# The columns that pages are ordered by, and the places of the same in a row.
_PLANNED = "o.instance, o.sample", (1, 2)
_BEGUN = "o.attempt", (3, 3)
_MEMBERS = "r.orders, r.member", (6, 8)

_ROW = """
    SELECT i.name, o.instance, o.sample, o.attempt, o.kind, o.score, r.orders, s.key,
        coalesce(r.member, o.sample)
"""
_WITH_ORDER = """
    JOIN instance i ON i.id = o.instance
    LEFT JOIN rollout r ON r.instance = o.instance AND r.sample = o.sample
    LEFT JOIN orders s ON s.id = r.orders
"""
_CHOSEN = f"{_ROW} FROM outcome o {_WITH_ORDER}"
_COMPLETE = f"""
    {_CHOSEN} WHERE (o.instance, o.sample) > (:one, :two)
    AND (SELECT count(*) FROM outcome c WHERE c.instance = o.instance) >= :samples
"""
_ORDERED = f"""
    {_ROW} FROM rollout r JOIN outcome o ON o.instance = r.instance AND o.sample = r.sample
    JOIN instance i ON i.id = r.instance JOIN orders s ON s.id = r.orders
    WHERE (r.orders, r.member) > (:one, :two) AND NOT EXISTS (
        SELECT 1 FROM rollout m LEFT JOIN outcome c ON c.instance = m.instance AND c.sample = m.sample
        WHERE m.orders = r.orders AND c.sample IS NULL)
"""
_SETTLED = "(SELECT *, id AS attempt FROM attempt WHERE settled IS NOT NULL)"
_ENDED = f"{_ROW} FROM {_SETTLED} o {_WITH_ORDER}"
# Those that only graded work again have no conversation of their own.
_EVERY = f"{_ENDED} WHERE o.attempt > :one AND o.regrades IS NULL"
