"""What calls cost: prices by model, and the cost of a usage in whole billionths of a dollar.

Where prices come from is in `gateway/prices.py`. What is not known stays unknown; it is never zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import msgspec

from .records import Record, Usage

LARGEST_COST = 1 << 50  # billionths of a dollar; what an upstream claims is not trusted further than this
_MILLION = 1_000_000


class Rates(Record, frozen=True, kw_only=True):
    """US dollars for a million tokens. Cached and written input costs as much as other input if not said,
    reasoning as much as other output."""

    input: float
    output: float
    cached: float | None = None
    written: float | None = None
    reasoning: float | None = None


class Over(Rates, frozen=True, kw_only=True):
    """The rates of a call whose input has more than `tokens` tokens."""

    tokens: int


class Price(Rates, frozen=True, kw_only=True):
    """A model's."""

    over: tuple[Over, ...] = ()

    def __post_init__(self) -> None:
        for rates in (self, *self.over):
            given = (rates.input, rates.output, rates.cached, rates.written, rates.reasoning)
            if not all(0.0 <= (rate or 0.0) < 1e6 for rate in given):
                raise ValueError("a price is a number of US dollars for a million tokens, not below 0")


def find(table: Mapping[str, Price], model: str) -> Price | None:
    """The price under the model's own name, or else under the longest pattern that fits it."""
    if model in table:
        return table[model]
    fitting = [pattern for pattern in table if fnmatchcase(model, pattern)]
    return table[max(fitting, key=lambda pattern: (len(pattern), pattern))] if fitting else None


def priced(usage: Usage, price: Price | None, *, billed: bool = True) -> Usage:
    """`usage` with its cost; as it is where the price or what was used is unknown."""
    if not billed:
        return msgspec.structs.replace(usage, priced=usage.requests)
    if price is None or not usage.tokens:
        return usage
    cost = min(nanodollars(usage, price), LARGEST_COST)
    return msgspec.structs.replace(usage, nanodollars=cost, priced=usage.requests)


def nanodollars(usage: Usage, price: Price) -> int:
    """What one call with this usage costs."""
    rates: Rates = price
    for tier in sorted(price.over, key=lambda tier: tier.tokens):
        rates = tier if usage.input_tokens > tier.tokens else rates
    plain = max(0, usage.input_tokens - usage.cached_tokens - usage.written_tokens)
    cached = rates.input if rates.cached is None else rates.cached
    written = rates.input if rates.written is None else rates.written
    reasoning = rates.output if rates.reasoning is None else rates.reasoning
    thoughts = min(usage.reasoning_tokens, usage.output_tokens)
    total = (
        plain * nano(rates.input)
        + usage.cached_tokens * nano(cached)
        + usage.written_tokens * nano(written)
        + (usage.output_tokens - thoughts) * nano(rates.output)
        + thoughts * nano(reasoning)
    )
    return (total + _MILLION // 2) // _MILLION


def nano(amount: float) -> int:
    """US dollars in billionths."""
    return round(amount * 1e9)


def dollars(amount: int) -> str:
    """Billionths of a dollar as people read them: `$12.34`, `$0.0042`."""
    if 0 < amount < 1000:
        return "less than $0.000001"
    if amount >= 1e9:
        return f"${amount / 1e9:,.2f}"
    whole, _, rest = f"{amount / 1e9:.6f}".rstrip("0").partition(".")
    return f"${whole}.{rest:0<2}"
