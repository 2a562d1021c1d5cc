"""Reopens closed samples: deletes the outcome and writes the attempt and round from which retries count anew.

The functions run in the writer's thread and transaction. `core/policy.py` selects the samples;
`resume_state.py` reads the progress of a reopened sample after a kill.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.policy import ClosedSample
from ..core.records import FailureOrigin

PAGE = 256  # closed samples in memory at a time


def closed_samples(connection: sqlite3.Connection) -> Iterator[ClosedSample]:
    """Yield every sample with an outcome, in the order of planning."""
    at = (0, -1)
    while page := connection.execute(_CLOSED, (*at, PAGE)).fetchall():
        yield from map(_make_closed, page)
        at = page[-1][0], page[-1][1]


def closed_rollouts(connection: sqlite3.Connection, order: int) -> list[ClosedSample]:
    """Return the samples of an order that have an outcome."""
    of_order = "(o.instance, o.sample) IN (SELECT instance, sample FROM rollout WHERE orders = ?)"
    return [_make_closed(row) for row in connection.execute(f"{_COLUMNS} WHERE {of_order}", (order,))]


def reopen(
    connection: sqlite3.Connection, samples: Iterable[ClosedSample], now: float
) -> Iterator[tuple[str, float | None]]:
    """Reopen closed samples; yield kind and score of each deleted outcome."""
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


def find_reopening(connection: sqlite3.Connection, instance: int, sample: int) -> tuple[int, int]:
    """Return the attempts of a sample before it was last reopened, and its first round since; else (0, 1)."""
    row = connection.execute(
        "SELECT number, round FROM reopened WHERE instance = ? AND sample = ? ORDER BY number DESC LIMIT 1",
        (instance, sample),
    ).fetchone()
    return (0, 1) if row is None else (row[0], row[1])


def _make_closed(row: tuple[Any, ...]) -> ClosedSample:
    instance, sample, name, kind, place, failure, number, round_ = row
    return ClosedSample(
        instance=instance,
        sample=sample,
        name=name,
        kind=kind,
        where=FailureOrigin(place) if place else None,
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
