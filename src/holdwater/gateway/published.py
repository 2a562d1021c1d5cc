"""Asks the `genai-prices` package what a model costs: `python -m holdwater.gateway.published MODEL [URL]`.

A program of its own, started by `prices.py`, because the package is large and asked once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..core.prices import Over, Price


def main(model: str, url: str | None = None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(published(model, url)))


def published(model: str, url: str | None) -> Price | None:
    from genai_prices import Usage, calc_price  # type: ignore[import-not-found,unused-ignore]

    try:
        found = calc_price(
            Usage(input_tokens=1, output_tokens=1),
            model_ref=model,
            provider_api_url=url,
            genai_request_timestamp=datetime.now(UTC),
        ).model_price
        return _flat(found)
    except (LookupError, ValueError, AttributeError, TypeError):
        return None  # a model that it does not know, or a price that is not ours to read: unknown


def _flat(found: Any) -> Price | None:
    given = {
        "input": found.input_mtok,
        "output": found.output_mtok,
        "cached": found.cache_read_mtok,
        "written": found.cache_write_mtok,
    }
    if given["input"] is None or given["output"] is None:
        return None
    starts = sorted({tier.start for price in given.values() for tier in getattr(price, "tiers", ())})
    tiers = [Over(tokens=start, **_rates(given, start)) for start in starts]
    return Price(over=tuple(tiers), **_rates(given, 0))


def _rates(given: Mapping[str, Any], start: int) -> dict[str, Any]:
    return {name: _at(price, start) for name, price in given.items()}


def _at(price: Any, start: int) -> float | None:
    if price is None or not hasattr(price, "tiers"):
        return None if price is None else float(price)
    reached = [tier for tier in price.tiers if tier.start <= start]
    return float(max(reached, key=lambda tier: tier.start).price if reached else price.base)


if __name__ == "__main__":
    main(*sys.argv[1:])
