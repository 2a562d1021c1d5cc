"""Checks the rows of a ledger against each other: outcomes against verdicts, tallies against exchanges.

`audit.py` runs these checks. Each yields a sentence for every contradiction that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..core.policy import VerdictSummary, outcome_kind, verdict_kind
from ..core.records import NO_USAGE, ModelUsage, Outcome, Verdict
from .exchanges import AttemptSpending
from .rows import LedgerCounts, SettledColumns, bound_usage, finite_score

SCORED = ("passed", "failed")


def check_outcome(outcome: Outcome, name: str, verdict: Verdict) -> Iterator[str]:
    """Check that an outcome follows from its verdict."""
    result = VerdictSummary.of(verdict)
    kinds = {outcome_kind(result, spent=spent) for spent in (False, True)}
    score = finite_score(result.score or 0.0) if outcome.kind in SCORED else None
    if outcome.kind in kinds and outcome.where == result.where and outcome.score == score:
        return
    said = f"{outcome.kind}, score {outcome.score}"
    follows = " or ".join(sorted(kinds))
    yield (
        f"the outcome of `{name}` sample {outcome.sample} is {said};"
        f" the verdict of attempt {verdict.attempt} is {follows}, score {result.score}"
    )


def check_columns(columns: SettledColumns, verdict: Verdict) -> Iterator[str]:
    """Check that the columns of an attempt match its verdict."""
    for name, found, due in zip(SettledColumns._fields, columns, SettledColumns.of(verdict), strict=True):
        if found != due:
            yield f"attempt {verdict.attempt} has `{name}` {found}, its verdict says {due}"


def check_spending(found: AttemptSpending, verdict: Verdict) -> Iterator[str]:
    """Check that exchanges and usage of a verdict match the recorded exchanges of its attempt."""
    attempt = verdict.attempt
    if found.exchanges == verdict.exchanges:
        for what, recorded, told in (
            ("usage", found.usage, verdict.usage),
            ("saved", found.replayed_usage, verdict.replayed_usage),
        ):
            if recorded != told:
                yield f"attempt {attempt}: {what} by verdict {_render(told)}, by record {_render(recorded)}"
    # A verdict that a conductor wrote for a lost attempt may count fewer exchanges.
    elif found.exchanges < verdict.exchanges or verdict.failure is None:
        yield f"attempt {attempt} has {found.exchanges} exchanges, its verdict says {verdict.exchanges}"


class TallySums:
    """Sums all verdicts, to compare them with the tally."""

    def __init__(self) -> None:
        self._usage = NO_USAGE
        self._saved = NO_USAGE
        self._kinds: dict[str, int] = {}  # bound: the kinds of verdicts

    def add(self, verdict: Verdict) -> None:
        kind = verdict_kind(verdict.failure, verdict.grade.passed if verdict.grade else None)
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._usage = self._usage.plus(bound_usage(verdict.usage))
        self._saved = self._saved.plus(bound_usage(verdict.replayed_usage))

    def check(self, counts: LedgerCounts) -> Iterator[str]:
        for what, tallied, told in (
            ("usage", counts.usage, self._usage),
            ("saved", counts.saved, self._saved),
        ):
            if tallied != told:
                yield f"the tally says {what} {_render(tallied)}, all verdicts together {_render(told)}"
        if counts.verdicts != self._kinds:
            yield f"the tally says {counts.verdicts} verdicts, there are {self._kinds}"


def _render(usage: ModelUsage) -> str:
    fields = ((name, getattr(usage, name)) for name in usage.__struct_fields__)
    return ", ".join(f"{name} {amount}" for name, amount in fields if amount) or "nothing"
