"""Where prices come from: a table in TOML first, then the `genai-prices` package where it is installed.

What they mean is in `core/prices.py`. A run takes its model's price once, when it is made, and keeps it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..core.errors import BadInput
from ..core.prices import Over, Price, find

EXAMPLE = 'for example `["gpt-5*"]` with `input = 1.25`, `cached = 0.125` and `output = 10.0`'


def price_of(model: str, table: Mapping[str, Price], url: str | None = None) -> Price | None:
    """The price of a model that is served at `url`, if that is not its maker's own; None: unknown."""
    return find(table, model) or _published(model, url)


def read_prices(path: Path) -> dict[str, Price]:
    """A table of model patterns, each with US dollars for a million tokens."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    return {pattern: _price(path, pattern, given) for pattern, given in document.items()}


def _price(path: Path, pattern: str, given: Any) -> Price:
    try:
        return msgspec.convert(given, Price)
    except msgspec.ValidationError as error:
        text = str(error)
        raise BadInput(f"{path}: `{pattern}`: {text[0].lower()}{text[1:]}", EXAMPLE) from None


def _published(model: str, url: str | None) -> Price | None:
    """What `genai-prices` knows. It takes 100 MB, so it is loaded here and by nobody else."""
    try:
        from genai_prices import Usage, calc_price  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return None
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
