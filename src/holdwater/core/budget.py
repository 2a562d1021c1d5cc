"""Budgets of model calls: for an attempt in its `Limits`, for a run in a `RunBudget`. Decides, stops nobody.

The gateway's sessions keep an attempt to its own, `run/budget.py` a run.
"""

from __future__ import annotations

from .prices import dollars, nano
from .records import Failure, Limits, Phase, Record, Usage, Where


class RunBudget(Record, frozen=True):
    """What a run may use in all, over every conductor that it had."""

    requests: int | None = None
    tokens: int | None = None  # of input and output
    cost: float | None = None  # US dollars
    seconds: float | None = None

    def reached(self, usage: Usage, seconds: float) -> str | None:
        """Which budget is used up, in a sentence."""
        if self.requests is not None and usage.requests >= self.requests:
            return f"the run's budget is used up: {usage.requests} of {self.requests} requests"
        if self.tokens is not None and usage.tokens >= self.tokens:
            return f"the run's budget is used up: {usage.tokens} of {self.tokens} tokens"
        if self.cost is not None and usage.nanodollars >= nano(self.cost):
            used, allowed = dollars(usage.nanodollars), dollars(nano(self.cost))
            return f"the run's budget is used up: {used} of {allowed}"
        if self.seconds is not None and seconds >= self.seconds:
            return f"the run's budget is used up: {seconds:.0f} of {self.seconds:g} s"
        return None


def reached(limits: Limits, usage: Usage, calling: int = 0) -> Failure | None:
    """Why an attempt may make no further call, with `usage` recorded and `calling` calls on their way."""
    requests = usage.requests + calling
    if limits.requests is not None and requests >= limits.requests:
        return _used_up("requests", f"{requests} of {limits.requests} requests")
    if limits.input_tokens is not None and usage.input_tokens >= limits.input_tokens:
        return _used_up("tokens", f"{usage.input_tokens} of {limits.input_tokens} input tokens")
    if limits.output_tokens is not None and usage.output_tokens >= limits.output_tokens:
        return _used_up("tokens", f"{usage.output_tokens} of {limits.output_tokens} output tokens")
    if limits.cost is not None and usage.nanodollars >= nano(limits.cost):
        return _used_up("cost", f"{dollars(usage.nanodollars)} of {dollars(nano(limits.cost))}")
    return None


def _used_up(kind: str, figures: str) -> Failure:
    message = f"the attempt's budget is used up: {figures}"
    return Failure(where=Where.LIMIT, kind=kind, message=message, phase=Phase.ACTING, again=False)
