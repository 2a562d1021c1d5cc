"""Closed samples that are tried again: the outcome goes, and a row says from where tries count anew.

In the writer's thread and its transaction. Which samples: `core/reopening.py`; how such a sample stands after
a kill: `standing.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.records import Where
from ..core.reopening import ClosedSample

PAGE = 256  # closed samples in memory at a time


def closed_samples(connection: sqlite3.Connection) -> Iterator[ClosedSample]:
    """Every sample with an outcome, in the order of planning."""
    at = (0, -1)
    while page := connection.execute(_CLOSED, (*at, PAGE)).fetchall():
        yield from map(_closed, page)
        at = page[-1][0], page[-1][1]


def closed_rollouts(connection: sqlite3.Connection, order: int) -> list[ClosedSample]:
    """Those samples of a client's order that have an outcome."""
    of_order = "(o.instance, o.sample) IN (SELECT instance, sample FROM rollout WHERE orders = ?)"
    return [_closed(row) for row in connection.execute(f"{_COLUMNS} WHERE {of_order}", (order,))]


def reopen(
    connection: sqlite3.Connection, samples: Iterable[ClosedSample], now: float
) -> Iterator[tuple[str, float | None]]:
    """Open closed samples again; kind and score of each outcome that goes."""
    for closed in samples:
        key = (closed.instance, closed.sample)
        gone = connection.execute(
            "DELETE FROM outcome WHERE instance = ? AND sample = ? RETURNING kind, score", key
        ).fetchone()
        connection.execute(
            "INSERT INTO reopened (instance, sample, number, round, at) VALUES (?, ?, ?, ?, ?)",
            (*key, closed.number, closed.next_round, now),
        )
        yield gone[0], gone[1]


def reopened_at(connection: sqlite3.Connection, instance: int, sample: int) -> tuple[int, int]:
    """How many attempts a sample had when it was last reopened, and its first round since; else (0, 1)."""
    row = connection.execute(
        "SELECT number, round FROM reopened WHERE instance = ? AND sample = ? ORDER BY number DESC LIMIT 1",
        (instance, sample),
    ).fetchone()
    return (0, 1) if row is None else (row[0], row[1])


def _closed(row: tuple[Any, ...]) -> ClosedSample:
    instance, sample, name, kind, place, failure, number, round_ = row
    return ClosedSample(
        instance=instance,
        sample=sample,
        name=name,
        kind=kind,
        where=Where(place) if place else None,
        failure=failure or "",
        number=number,
        round=round_,
    )


_COLUMNS = """
    SELECT o.instance, o.sample, i.name, o.kind, o.place, a.failure,
        (SELECT max(number) FROM attempt WHERE instance = o.instance AND sample = o.sample),
        (SELECT max(round) FROM attempt WHERE instance = o.instance AND sample = o.sample)
    FROM outcome o JOIN instance i ON i.id = o.instance JOIN attempt a ON a.id = o.attempt
"""
_CLOSED = f"{_COLUMNS} WHERE (o.instance, o.sample) > (?, ?) ORDER BY o.instance, o.sample LIMIT ?"
