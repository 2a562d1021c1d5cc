"""Prices by model, the cost of a usage in whole billionths of a dollar, and the budgets of model calls.

`gateway/prices.py` loads the prices. An unknown cost stays unknown and never counts as zero. Sessions of the
gateway enforce the budget of an attempt, `run/resources/budget.py` that of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec

from .errors import RunFailed
from .options import ConfigOption, OptionGroup
from .records import AttemptFailure, AttemptPhase, FailureOrigin, Limits, ModelUsage, Record

LARGEST_COST = 1 << 50  # billionths of a dollar; a larger claim of an upstream is not trusted
_MILLION = 1_000_000


class TokenRates(Record, frozen=True, kw_only=True):
    """US dollars per million tokens.

    Without their own rates, cached and written input cost as much as other input, and reasoning as much as
    other output.
    """

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    reasoning: float | None = None


class TierRates(TokenRates, frozen=True, kw_only=True):
    """The rates of a call whose input has more than `tokens` tokens."""

    tokens: int


class ModelPrice(TokenRates, frozen=True, kw_only=True):
    """The price of a model."""

    over: tuple[TierRates, ...] = ()

    def __post_init__(self) -> None:
        for rates in (self, *self.over):
            given = (rates.input, rates.output, rates.cached, rates.written, rates.reasoning)
            if not all(0.0 <= (rate or 0.0) < 1e6 for rate in given):
                raise ValueError("a price must be a number of US dollars per million tokens, at least 0")


def find_price(table: Mapping[str, ModelPrice], model: str) -> ModelPrice | None:
    """Return the price under the model's own name, or else under the longest matching pattern."""
    if model in table:
        return table[model]
    fitting = [pattern for pattern in table if fnmatchcase(model, pattern)]
    return table[max(fitting, key=lambda pattern: (len(pattern), pattern))] if fitting else None


def add_cost(usage: ModelUsage, price: ModelPrice | None, *, billed: bool = True) -> ModelUsage:
    """Return `usage` with its cost; unchanged if the price or the token counts are unknown."""
    if not billed:
        return msgspec.structs.replace(usage, priced=usage.requests)
    if price is None or not usage.tokens:
        return usage
    cost = min(compute_cost(usage, price), LARGEST_COST)
    return msgspec.structs.replace(usage, nanodollars=cost, priced=usage.requests)


def compute_cost(usage: ModelUsage, price: ModelPrice) -> int:
    """Return the cost of one call in billionths of a dollar."""
    rates: TokenRates = price
    for tier in sorted(price.over, key=lambda tier: tier.tokens):
        rates = tier if usage.input_tokens > tier.tokens else rates
    plain = max(0, usage.input_tokens - usage.cached_tokens - usage.written_tokens)
    cached = rates.input if rates.cached is None else rates.cached
    written = rates.input if rates.written is None else rates.written
    reasoning = rates.output if rates.reasoning is None else rates.reasoning
    thoughts = min(usage.reasoning_tokens, usage.output_tokens)
    total = (
        plain * to_nanodollars(rates.input)
        + usage.cached_tokens * to_nanodollars(cached)
        + usage.written_tokens * to_nanodollars(written)
        + (usage.output_tokens - thoughts) * to_nanodollars(rates.output)
        + thoughts * to_nanodollars(reasoning)
    )
    return (total + _MILLION // 2) // _MILLION


def to_nanodollars(amount: float) -> int:
    """Convert US dollars to billionths."""
    return round(amount * 1e9)


def format_dollars(amount: int) -> str:
    """Format billionths of a dollar: `$12.34`, `$0.0042`."""
    if 0 < amount < 1000:
        return "less than $0.000001"
    if amount >= 1e9:
        return f"${amount / 1e9:,.2f}"
    whole, _, rest = f"{amount / 1e9:.6f}".rstrip("0").partition(".")
    return f"${whole}.{rest:0<2}"


class RunBudget(Record, frozen=True):
    """The total usage allowed for a run, over all of its conductors."""

    requests: Annotated[
        int | None,
        ConfigOption(
            OptionGroup.BUDGETS,
            "Model calls of the run; reaching it stops the run",
            name="run_requests",
            positive=True,
            resume="The budget of model calls",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        ConfigOption(
            OptionGroup.BUDGETS,
            "Input and output tokens of the run",
            name="run_tokens",
            positive=True,
            resume="The budget of tokens",
        ),
    ] = None
    cost: Annotated[
        float | None,
        ConfigOption(
            OptionGroup.BUDGETS,
            "Cost of the run",
            name="run_cost",
            positive=True,
            resume="The budget of cost, in US dollars",
        ),
    ] = None
    seconds: Annotated[
        float | None,
        ConfigOption(
            OptionGroup.BUDGETS,
            "Seconds that the run may take, resumes included",
            name="run_time",
            positive=True,
            resume="The budget of time, in seconds",
        ),
    ] = None

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


def make_price_error(model: str | None) -> RunFailed:
    return RunFailed(
        f"a cost limit needs the model's price, which is unknown: `{model}`",
        "give it with `--prices FILE.toml`",
        kind="price",
    )
