"""What the rows of a ledger say against each other: outcomes against verdicts, tallies against exchanges.

Comparisons for `audit.py`. Each yields its contradictions as sentences, and nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..core.policy import Result, outcome_kind, verdict_kind
from ..core.records import NO_USAGE, Outcome, Usage, Verdict
from .exchanges import Spending
from .tally import Counts, bound_usage, finite_score

SCORED = ("passed", "failed")


class SettledColumns(NamedTuple):
    """The columns of an attempt that repeat its verdict."""

    kind: str | None
    place: str | None
    passed: bool | None
    score: float | None
    exchanges: int | None


def check_outcome(outcome: Outcome, name: str, verdict: Verdict) -> Iterator[str]:
    """An outcome follows from the verdict that it rests on."""
    result = Result.of(verdict)
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
    """The columns of an attempt are those of its verdict."""
    failure, grade = verdict.failure, verdict.grade
    passed = grade.passed if grade else None
    expected = SettledColumns(
        kind=verdict_kind(failure, passed),
        place=failure.where.value if failure else None,
        passed=passed,
        score=finite_score(grade.score) if grade else None,
        exchanges=verdict.exchanges,
    )
    for name, found, due in zip(SettledColumns._fields, columns, expected, strict=True):
        if found != due:
            yield f"attempt {verdict.attempt} has `{name}` {found}, its verdict says {due}"


def check_spending(found: Spending, verdict: Verdict) -> Iterator[str]:
    """A verdict has as many exchanges and as much usage as the record of its attempt."""
    attempt = verdict.attempt
    if found.exchanges == verdict.exchanges:
        for what, recorded, told in (
            ("usage", found.usage, verdict.usage),
            ("saved", found.saved, verdict.saved),
        ):
            if recorded != told:
                yield f"attempt {attempt}: {what} by verdict {_render(told)}, by record {_render(recorded)}"
    # a verdict over an attempt that could no longer speak for itself may know of fewer exchanges
    elif found.exchanges < verdict.exchanges or verdict.failure is None:
        yield f"attempt {attempt} has {found.exchanges} exchanges, its verdict says {verdict.exchanges}"


class TallySums:
    """What all verdicts add up to, to be held against the tally."""

    def __init__(self) -> None:
        self._usage = NO_USAGE
        self._saved = NO_USAGE
        self._kinds: dict[str, int] = {}  # bound: the kinds of verdicts

    def add(self, verdict: Verdict) -> None:
        passed = verdict.grade.passed if verdict.grade else None
        kind = verdict_kind(verdict.failure, passed)
        self._kinds[kind] = self._kinds.get(kind, 0) + 1
        self._usage = self._usage.plus(bound_usage(verdict.usage))
        self._saved = self._saved.plus(bound_usage(verdict.saved))

    def check(self, counts: Counts) -> Iterator[str]:
        for what, tallied, told in (
            ("usage", counts.usage, self._usage),
            ("saved", counts.saved, self._saved),
        ):
            if tallied != told:
                yield f"the tally says {what} {_render(tallied)}, all verdicts together {_render(told)}"
        if counts.verdicts != self._kinds:
            yield f"the tally says {counts.verdicts} verdicts, there are {self._kinds}"


def _render(usage: Usage) -> str:
    fields = ((name, getattr(usage, name)) for name in usage.__struct_fields__)
    return ", ".join(f"{name} {amount}" for name, amount in fields if amount) or "nothing"
