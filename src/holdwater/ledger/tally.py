"""The counts of a run, updated together with its rows, so that a summary costs the same at any size."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..core.config import RunConfig
from ..core.prices import LARGEST_COST
from ..core.records import ModelUsage, Record

LARGEST_USAGE = 1 << 40  # a larger number from an upstream is not trusted
TALLY_QUERY = "SELECT key, value FROM tally"  # one row per count
# Key prefix in `meta`, followed by a conductor's token: its run time in seconds by a monotonic clock.
RAN_PREFIX = "ran:"
# SQL expression over selected rows of `conductor`: the seconds that these conductors ran.
CONDUCTED_SECONDS = (
    f"coalesce(sum(coalesce((SELECT value FROM meta WHERE key = '{RAN_PREFIX}' || token),"
    " max(0.0, seen - started))), 0.0)"
)


class LedgerCounts(Record, frozen=True):
    """The counts of a ledger. `planned` counts instances; `settled` counts samples."""

    planned: int = 0
    ordered: int = 0  # rollouts ordered by clients of a server
    settled: int = 0
    attempts: int = 0
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    verdicts: dict[str, int] = msgspec.field(default_factory=dict)
    events: dict[str, int] = msgspec.field(default_factory=dict)
    usage: ModelUsage = ModelUsage()
    saved: ModelUsage = ModelUsage()
    scored: int = 0
    score: float | None = None  # the mean over scored samples

    def samples(self, config: RunConfig) -> int:
        """Return the number of samples to settle, as known so far."""
        return self.ordered if config.serving is not None else self.planned * config.samples


def parse_counts(rows: list[tuple[Any, ...]]) -> LedgerCounts:
    """Parse the rows of `TALLY_QUERY`."""
    tally = dict(rows)
    outcomes = _select_counts(tally, "outcome:")
    scored = int(tally.get("scored", 0))
    return LedgerCounts(
        planned=int(tally.get("planned", 0)),
        ordered=int(tally.get("ordered", 0)),
        settled=sum(outcomes.values()),
        attempts=int(tally.get("attempts", 0)),
        outcomes=outcomes,
        verdicts=_select_counts(tally, "verdict:"),
        events=_select_counts(tally, "event:"),
        usage=ModelUsage(**_select_counts(tally, "usage:")),
        saved=ModelUsage(**_select_counts(tally, "saved:")),
        scored=scored,
        score=round(tally["score"] / scored, 9) if scored else None,
    )


def bound_usage(usage: ModelUsage) -> ModelUsage:
    """Return the usage limited to the largest numbers that the tally counts."""
    fields = {name: min(getattr(usage, name), LARGEST_USAGE) for name in usage.__struct_fields__}
    return ModelUsage(**{**fields, "nanodollars": min(usage.nanodollars, LARGEST_COST)})


def finite_score(score: float | None) -> float | None:
    """Return a finite score or None: SQLite has no NaN, and a sum with an infinity is useless."""
    return score if score is not None and math.isfinite(score) else None


def _select_counts(tally: dict[str, float], prefix: str) -> dict[str, int]:
    found = {key.removeprefix(prefix): int(n) for key, n in tally.items() if key.startswith(prefix)}
    return {key: n for key, n in found.items() if n}
