"""Reads the rows behind trajectories: the attempt of a sample, how it ended, and the order it belongs to.

Rows are small and paged. The messages are in `conversation/nodes.py`; `conversation/order_results.py` builds
results for clients.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from ..core.errors import BadInput, LedgerCorrupt
from ..core.records import FailureOrigin, Record
from .reader import PAGE, LedgerReader

OUTCOMES = ("passed", "failed", *FailureOrigin)


class RolloutRow(Record, frozen=True):
    """A finished attempt."""

    instance: str
    row: int  # the instance's row
    sample: int
    attempt: int
    kind: str
    score: float | None
    order: int | None  # None: no client ordered it, it belongs to an ordinary run
    key: str | None
    member: int  # its number within its order, or among the samples of its instance


class RolloutFilter(Record, frozen=True):
    """Selects rollouts."""

    outcome: str | None = None
    only: tuple[str, ...] = ()  # patterns of instance ids
    attempts: Literal["chosen", "all"] = "chosen"

    def __post_init__(self) -> None:
        if self.outcome is not None and self.outcome not in OUTCOMES:
            raise BadInput(f"no such outcome: `{self.outcome}`", f"one of {', '.join(OUTCOMES)}")
        if self.attempts not in ("chosen", "all"):
            raise BadInput(f"invalid `attempts`, neither `chosen` nor `all`: `{self.attempts}`")

    def takes(self, row: RolloutRow) -> bool:
        return not self.only or any(fnmatch.fnmatchcase(row.instance, pattern) for pattern in self.only)


def find_rollout(reader: LedgerReader, instance: int, sample: int) -> RolloutRow:
    """Return the chosen attempt of a closed sample."""
    query = f"{_make_orders_clause(reader)}{_CHOSEN} WHERE o.instance = ? AND o.sample = ?"
    for row in reader.rows(query, (instance, sample)):
        return RolloutRow(*row)
    raise LedgerCorrupt(f"sample {sample} of instance {instance} has no outcome")


def find_ended_attempt(reader: LedgerReader, attempt: int) -> RolloutRow:
    """Return a finished attempt."""
    for row in reader.rows(f"{_make_orders_clause(reader)}{_ENDED} WHERE o.attempt = ?", (attempt,)):
        return RolloutRow(*row)
    raise BadInput(f"no such attempt, or it is not finished: {attempt}")


def read_rollouts(reader: LedgerReader, wanted: RolloutFilter) -> Iterator[RolloutRow]:
    """Yield samples in the order of planning, or all attempts in the order in which they began."""
    if wanted.attempts == "chosen":
        return _read_pages(reader, wanted, f"{_CHOSEN} WHERE (o.instance, o.sample) > (:one, :two)", _PLANNED)
    return _read_pages(reader, wanted, _EVERY, _BEGUN)


def read_groups(reader: LedgerReader, wanted: RolloutFilter) -> Iterator[list[RolloutRow]]:
    """Yield complete groups of closed samples: all samples of an order, or of an instance."""
    if wanted.attempts != "chosen":
        raise BadInput("groups are made of chosen attempts", "leave out `attempts`")
    serves = not _make_orders_clause(reader) and reader.rows("SELECT 1 FROM orders LIMIT 1")
    query, by = (_ORDERED, _MEMBERS) if serves else (_COMPLETE, _PLANNED)
    rows = _read_pages(reader, wanted, query, by)
    for _, group in groupby(rows, key=lambda row: row.order or row.row):
        yield list(group)


def count_rollouts(reader: LedgerReader, wanted: RolloutFilter) -> int:
    """Return the number of rollouts that `read_rollouts` yields now."""
    if wanted.only:
        return sum(1 for _ in read_rollouts(reader, wanted))
    chosen = "outcome WHERE true"
    every = "attempt WHERE settled IS NOT NULL AND regrades IS NULL"
    table = chosen if wanted.attempts == "chosen" else every
    query = f"SELECT count(*) FROM {table} AND (:kind IS NULL OR kind = :kind)"
    return int(reader.rows(query, {"kind": wanted.outcome})[0][0])


def _read_pages(
    reader: LedgerReader, wanted: RolloutFilter, query: str, by: tuple[str, tuple[int, int]]
) -> Iterator[RolloutRow]:
    columns, fields = by
    ordered = (
        f"{_make_orders_clause(reader)}{query} AND (:kind IS NULL OR o.kind = :kind) ORDER BY {columns} LIMIT"
    )
    about: dict[str, Any] = {"kind": wanted.outcome, "samples": reader.config.samples, "one": 0, "two": -1}
    while page := reader.rows(f"{ordered} {PAGE}", about):
        yield from filter(wanted.takes, (RolloutRow(*row) for row in page))
        about["one"], about["two"] = (page[-1][field] for field in fields)


def _make_orders_clause(reader: LedgerReader) -> str:
    """Return a prefix for queries: an older ledger has no orders, so that empty tables stand in for them."""
    return "" if reader.rows("SELECT 1 FROM sqlite_master WHERE name = 'rollout'") else _NONE_ORDERED


_NONE_ORDERED = (
    "WITH rollout (instance, sample, orders, member) AS (SELECT 0, 0, 0, 0 WHERE false),"
    " orders (id, key) AS (SELECT 0, '' WHERE false) "
)
# The columns that order the pages, and their indexes in a row.
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
# Attempts that only regrade kept work have no conversation of their own.
_EVERY = f"{_ENDED} WHERE o.attempt > :one AND o.regrades IS NULL"
