"""The rows and counts that a `LedgerReader` returns, as records, and the bounds on counted numbers.

Counts are updated together with their rows, so that a summary costs the same at any size.
"""

from __future__ import annotations

import math
import sqlite3
from typing import Any, NamedTuple

import msgspec

from ..core.config import RunConfig
from ..core.masking import clean_text
from ..core.policy import verdict_kind
from ..core.prices import LARGEST_COST
from ..core.records import FailureOrigin, ModelUsage, PhaseTimes, Record, Verdict

LONGEST_MESSAGE = 500  # characters of a message that a list shows
LARGEST_USAGE = 1 << 40  # a larger number from an upstream is not trusted
TALLY_QUERY = "SELECT key, value FROM tally"  # one row per count
# Key prefix in `meta`, followed by a conductor's token: its run time in seconds by a monotonic clock.
RAN_PREFIX = "ran:"
# SQL expression over selected rows of `conductor`: the seconds that these conductors ran.
CONDUCTED_SECONDS = (
    f"coalesce(sum(coalesce((SELECT value FROM meta WHERE key = '{RAN_PREFIX}' || token),"
    " max(0.0, seen - started))), 0.0)"
)


class InstanceRow(Record, frozen=True):
    id: int
    name: str
    place: str
    digest: bytes


class OutcomeRow(Record, frozen=True):
    """The outcome of a sample; usage and times are of the chosen attempt, `spent` is of all attempts.

    If the chosen attempt graded kept work, usage and times are of the attempt in which the agent acted.
    """

    instance: str
    row: int  # the instance's row
    sample: int
    kind: str
    score: float | None
    where: FailureOrigin | None
    failure: str  # the message of the failure
    attempts: int
    attempt: int  # the chosen one
    usage: ModelUsage
    times: PhaseTimes
    closed: float
    spent: ModelUsage = ModelUsage()
    regrade: str = ""  # `not regraded: ` and the reason, if the last regrade kept this outcome


class AttemptRow(Record, frozen=True):
    """An attempt, and its verdict once it is settled."""

    attempt: int
    instance: str
    row: int
    sample: int
    number: int
    round: int
    scale: int
    alone: bool
    regrades: int | None
    token: int
    started: float
    settled: float | None
    kind: str | None
    verdict: Verdict | None
    dropped: str | None = None  # the `--keep` rule by which its files were dropped


class SettledColumns(NamedTuple):
    """The columns of an attempt that duplicate fields of its verdict."""

    kind: str | None
    place: str | None
    passed: bool | None
    score: float | None
    exchanges: int | None

    @classmethod
    def of(cls, verdict: Verdict) -> SettledColumns:
        failure, grade = verdict.failure, verdict.grade
        passed = grade.passed if grade else None
        place = failure.where.value if failure else None
        score = finite_score(grade.score) if grade else None
        return cls(verdict_kind(failure, passed), place, passed, score, verdict.exchanges)


class SettledFigures(NamedTuple):
    """Figures of a verdict in columns of their own, so that rows can be sorted and found by them."""

    input_tokens: int
    output_tokens: int
    nanodollars: int | None  # None: the cost of some calls is unknown
    seconds: float
    peak_memory: int
    message: str  # of the failure, or the end of a failed grade's detail
    answer: str  # the beginning of the answer, as JSON
    version: str  # of the policy that answered the last call

    @classmethod
    def of(cls, verdict: Verdict) -> SettledFigures:
        usage, times = bound_usage(verdict.usage), verdict.times
        return cls(
            usage.input_tokens,
            usage.output_tokens,
            usage.nanodollars if usage.cost is not None else None,
            times.setup + times.acting + times.grading,
            verdict.peak_memory,
            clean_text(_explain_end(verdict))[:LONGEST_MESSAGE],
            clean_text((verdict.answer or "")[:LONGEST_MESSAGE]),
            clean_text(verdict.version[:LONGEST_MESSAGE]),
        )


def _explain_end(verdict: Verdict) -> str:
    if verdict.failure is not None:
        return verdict.failure.message
    detail = verdict.grade.detail.strip() if verdict.grade is not None and not verdict.grade.passed else ""
    return detail[-4 * LONGEST_MESSAGE :].rpartition("\n")[2]


class EventRow(Record, frozen=True):
    at: float
    kind: str
    message: str
    attempt: int | None
    token: int


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


def read_counts(connection: sqlite3.Connection) -> LedgerCounts:
    return parse_counts(connection.execute(TALLY_QUERY).fetchall())


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
