"""Budgets of model calls: for an attempt in its `Limits`, for a run in a `RunBudget`.

Pure: nothing is stopped here. The gateway's sessions enforce the budget of an attempt,
`run/resources/budget.py` that of a run.
"""

from __future__ import annotations

from .prices import format_dollars, to_nanodollars
from .records import AttemptFailure, AttemptPhase, FailureOrigin, Limits, ModelUsage, Record


class RunBudget(Record, frozen=True):
    """The total usage allowed for a run, over all of its conductors."""

    requests: int | None = None
    tokens: int | None = None  # input and output tokens
    cost: float | None = None  # US dollars
    seconds: float | None = None

    def find_used_up(self, usage: ModelUsage, seconds: float) -> str | None:
        """Return which budget is used up, as a sentence; None: none is."""
        if self.requests is not None and usage.requests >= self.requests:
            return f"the run's budget is used up: {usage.requests} of {self.requests} requests"
        if self.tokens is not None and usage.tokens >= self.tokens:
            return f"the run's budget is used up: {usage.tokens} of {self.tokens} tokens"
        if self.cost is not None and usage.nanodollars >= to_nanodollars(self.cost):
            used, allowed = format_dollars(usage.nanodollars), format_dollars(to_nanodollars(self.cost))
            return f"the run's budget is used up: {used} of {allowed}"
        if self.seconds is not None and seconds >= self.seconds:
            return f"the run's budget is used up: {seconds:.0f} of {self.seconds:g} s"
        return None


def find_used_up(limits: Limits, usage: ModelUsage, calling: int = 0) -> AttemptFailure | None:
    """Return why an attempt may make no further call; None: it may.

    `usage` is the recorded usage, `calling` the number of calls in progress.
    """
    requests = usage.requests + calling
    if limits.requests is not None and requests >= limits.requests:
        return _make_failure("requests", f"{requests} of {limits.requests} requests")
    if limits.input_tokens is not None and usage.input_tokens >= limits.input_tokens:
        return _make_failure("tokens", f"{usage.input_tokens} of {limits.input_tokens} input tokens")
    if limits.output_tokens is not None and usage.output_tokens >= limits.output_tokens:
        return _make_failure("tokens", f"{usage.output_tokens} of {limits.output_tokens} output tokens")
    if limits.cost is not None and usage.nanodollars >= to_nanodollars(limits.cost):
        return _make_failure(
            "cost", f"{format_dollars(usage.nanodollars)} of {format_dollars(to_nanodollars(limits.cost))}"
        )
    return None


def _make_failure(kind: str, figures: str) -> AttemptFailure:
    message = f"the attempt's budget is used up: {figures}"
    return AttemptFailure(
        where=FailureOrigin.LIMIT, kind=kind, message=message, phase=AttemptPhase.ACTING, again=False
    )
