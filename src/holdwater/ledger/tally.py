"""The counts of a run, kept in step with its rows, so that a summary costs the same at any size."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..core.config import RunConfig
from ..core.prices import LARGEST_COST
from ..core.records import Record, Usage

LARGEST_USAGE = 1 << 40  # what an upstream claims is not trusted further than this
TALLY = "SELECT key, value FROM tally"  # a row for each thing that is counted
RAN = "ran:"  # in `meta`, with a conductor's token: the seconds that it has run, by a clock that is never set
# The seconds that conductors ran, of the rows of `conductor` that are selected.
CONDUCTED = (
    f"coalesce(sum(coalesce((SELECT value FROM meta WHERE key = '{RAN}' || token),"
    " max(0.0, seen - started))), 0.0)"
)


class Counts(Record, frozen=True):
    """What there is in a ledger. `planned` counts instances; `settled` counts samples."""

    planned: int = 0
    ordered: int = 0  # rollouts, by clients of a server
    settled: int = 0
    attempts: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    verdicts: dict[str, int] = msgspec.field(default_factory=dict)
    events: dict[str, int] = msgspec.field(default_factory=dict)
    usage: Usage = Usage()
    saved: Usage = Usage()
    scored: int = 0
    score: float | None = None  # the mean over scored samples

    def samples(self, config: RunConfig) -> int:
        """How many there are to settle, of what is known so far."""
        return self.ordered if config.serving is not None else self.planned * config.samples


def counts(rows: list[tuple[Any, ...]]) -> Counts:
    """What the rows of `TALLY` say."""
    tally = dict(rows)
    outcomes = _of(tally, "outcome:")
    scored = int(tally.get("scored", 0))
    return Counts(
        planned=int(tally.get("planned", 0)),
        ordered=int(tally.get("ordered", 0)),
        settled=sum(outcomes.values()),
        attempts=int(tally.get("attempts", 0)),
        outcomes=outcomes,
        verdicts=_of(tally, "verdict:"),
        events=_of(tally, "event:"),
        usage=Usage(**_of(tally, "usage:")),
        saved=Usage(**_of(tally, "saved:")),
        scored=scored,
        score=round(tally["score"] / scored, 9) if scored else None,
    )


def bound_usage(usage: Usage) -> Usage:
    """The usage as it is counted."""
    fields = {name: min(getattr(usage, name), LARGEST_USAGE) for name in usage.__struct_fields__}
    return Usage(**{**fields, "nanodollars": min(usage.nanodollars, LARGEST_COST)})


def finite_score(score: float | None) -> float | None:
    """SQLite has no NaN, and a sum with an infinity in it says nothing."""
    return score if score is not None and math.isfinite(score) else None


def _of(tally: dict[str, float], prefix: str) -> dict[str, int]:
    found = {key.removeprefix(prefix): int(n) for key, n in tally.items() if key.startswith(prefix)}
    return {key: n for key, n in found.items() if n}
