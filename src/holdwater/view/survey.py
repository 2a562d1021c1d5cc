"""A look over a run's outcomes for a page: what to show first, in one pass and a fixed amount of memory."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import islice

from ..core.records import Record
from ..core.summary import Summary
from ..ledger.reader import OutcomeRow

MOST_ROWS = 40
MOST_SLOWEST = 3
MOST_KINDS = 20
MOST_LOOKED_AT = 100_000  # outcomes: a page comes soon, also of a run with millions

Ranked = tuple[float, int, OutcomeRow]  # the number breaks ties: rows are never compared


class Survey(Record, frozen=True):
    """What a page shows of a run's outcomes."""

    rows: tuple[OutcomeRow, ...]  # in the order of planning; problems first, when there are too many
    hidden: int
    first: dict[str, OutcomeRow]  # kind -> the first that ended so
    slowest: tuple[OutcomeRow, ...]


def survey(outcomes: Iterable[OutcomeRow], summary: Summary) -> Survey:
    urgent: list[Ranked] = []  # a heap of at most MOST_ROWS, the one to drop next on top
    slowest: list[Ranked] = []  # a heap of at most MOST_SLOWEST
    first: dict[str, OutcomeRow] = {}  # at most MOST_KINDS
    for number, row in enumerate(islice(outcomes, MOST_LOOKED_AT)):
        keep(urgent, (urgency(row), -number, row), MOST_ROWS)
        keep(slowest, (seconds(row), -number, row), MOST_SLOWEST)
        if len(first) < MOST_KINDS:
            first.setdefault(row.kind, row)
    hidden = max(0, summary.settled - len(urgent))
    order = sorted(urgent, reverse=True) if hidden else sorted(urgent, key=lambda ranked: -ranked[1])
    return Survey(
        rows=tuple(row for _, _, row in order),
        hidden=hidden,
        first=first,
        slowest=tuple(row for _, _, row in sorted(slowest, reverse=True)),
    )


def keep(heap: list[Ranked], item: Ranked, most: int) -> None:
    """Put `item` in, and the least of all out when there are more than `most`."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def urgency(row: OutcomeRow) -> int:
    """An infrastructure failure comes before a failed problem, and that before a pass."""
    return {"passed": 0, "failed": 1}.get(row.kind, 2)


def seconds(row: OutcomeRow) -> float:
    return row.times.setup + row.times.acting + row.times.grading
