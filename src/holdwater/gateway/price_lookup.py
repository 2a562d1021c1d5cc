"""Looks up a model's price in `genai-prices`: `python -m holdwater.gateway.price_lookup MODEL [URL]`.

`prices.py` runs it as a separate process, because the package is large and needed only once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..core.prices import ModelPrice, TierRates


def main(model: str, url: str | None = None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(look_up_price(model, url)))


def look_up_price(model: str, url: str | None) -> ModelPrice | None:
    from genai_prices import Usage, calc_price  # type: ignore[import-not-found,unused-ignore]

    try:
        found = calc_price(
            Usage(input_tokens=1, output_tokens=1),
            model_ref=model,
            provider_api_url=url,
            genai_request_timestamp=datetime.now(UTC),
        ).model_price
        return _flatten_price(found)
    except (LookupError, ValueError, AttributeError, TypeError):
        return None  # an unknown model, or a price in an unsupported form


def _flatten_price(found: Any) -> ModelPrice | None:
    given = {
        "input": found.input_mtok,
        "output": found.output_mtok,
        "cached": found.cache_read_mtok,
        "written": found.cache_write_mtok,
    }
    if given["input"] is None or given["output"] is None:
        return None
    starts = sorted({tier.start for price in given.values() for tier in getattr(price, "tiers", ())})
    tiers = [TierRates(tokens=start, **_collect_rates(given, start)) for start in starts]
    return ModelPrice(over=tuple(tiers), **_collect_rates(given, 0))


def _collect_rates(given: Mapping[str, Any], start: int) -> dict[str, Any]:
    return {name: _find_rate(price, start) for name, price in given.items()}


def _find_rate(price: Any, start: int) -> float | None:
    if price is None or not hasattr(price, "tiers"):
        return None if price is None else float(price)
    reached = [tier for tier in price.tiers if tier.start <= start]
    return float(max(reached, key=lambda tier: tier.start).price if reached else price.base)


if __name__ == "__main__":
    main(*sys.argv[1:])
