"""Selects the outcomes to show on a page, in one pass and a fixed amount of memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from ..core.records import Record
from ..core.summary import RunSummary
from ..ledger.rows import OutcomeRow

MOST_ROWS = 40
MOST_SLOWEST = 3
MOST_KINDS = 20
MOST_LOOKED_AT = 100_000  # outcomes; keeps a page fast for a run with millions

RankedRow = tuple[float, int, OutcomeRow]  # the number breaks ties, so rows are never compared


class OutcomeOverview(Record, frozen=True):
    """The outcomes that a page shows."""

    rows: tuple[OutcomeRow, ...]  # in the order of planning; problems first if there are too many
    hidden: int
    first: dict[str, OutcomeRow]  # kind -> its first outcome
    slowest: tuple[OutcomeRow, ...]


def make_overview(outcomes: Iterable[OutcomeRow], summary: RunSummary) -> OutcomeOverview:
    urgent: list[RankedRow] = []  # a heap of at most MOST_ROWS; the next row to drop is on top
    slowest: list[RankedRow] = []  # a heap of at most MOST_SLOWEST
    first: dict[str, OutcomeRow] = {}  # at most MOST_KINDS
    for number, row in enumerate(islice(outcomes, MOST_LOOKED_AT)):
        push_bounded(urgent, (urgency(row), -number, row), MOST_ROWS)
        push_bounded(slowest, (total_seconds(row), -number, row), MOST_SLOWEST)
        if len(first) < MOST_KINDS:
            first.setdefault(row.kind, row)
    hidden = max(0, summary.settled - len(urgent))
    order = sorted(urgent, reverse=True) if hidden else sorted(urgent, key=lambda ranked: -ranked[1])
    return OutcomeOverview(
        rows=tuple(row for _, _, row in order),
        hidden=hidden,
        first=first,
        slowest=tuple(row for _, _, row in sorted(slowest, reverse=True)),
    )


def push_bounded(heap: list[RankedRow], item: RankedRow, most: int) -> None:
    """Add `item`; drop the smallest item if there are more than `most`."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def urgency(row: OutcomeRow) -> int:
    """Rank infrastructure failures before failed samples, and failed samples before passed ones."""
    return {"passed": 0, "failed": 1}.get(row.kind, 2)


def total_seconds(row: OutcomeRow) -> float:
    return row.times.setup + row.times.acting + row.times.grading
