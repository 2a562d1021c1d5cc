"""Finds the price of a model: in a TOML table first, then in the `genai-prices` package if it is installed.

A run looks its model's price up once, when it is created, and keeps it; `core/prices.py` computes costs from
it. The package is queried in a process of its own: `python -m holdwater.gateway.prices MODEL [URL]`.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ..core.environment import build_python_environment
from ..core.errors import BadInput
from ..core.prices import ModelPrice, TierRates, find_price

PATIENCE = 30.0  # seconds
EXAMPLE = 'for example `["gpt-5*"]` with `input = 1.25`, `cached = 0.125` and `output = 10.0`'


def price_of(model: str, table: Mapping[str, ModelPrice], url: str | None = None) -> ModelPrice | None:
    """Return the price of a model; None if unknown. `url`: where it is served, if not by its maker."""
    return find_price(table, model) or _ask_package(model, url)


def read_prices(path: Path) -> dict[str, ModelPrice]:
    """Read a table of model patterns, each with US dollars per million tokens."""
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not TOML: {error}") from None
    return {pattern: _parse_price(path, pattern, given) for pattern, given in document.items()}


def _parse_price(path: Path, pattern: str, given: Any) -> ModelPrice:
    try:
        return msgspec.convert(given, ModelPrice)
    except msgspec.ValidationError as error:
        text = str(error).replace("Object contains unknown field", "unknown field:")
        raise BadInput(f"{path}: `{pattern}`: {text[0].lower()}{text[1:]}", EXAMPLE) from None


def _ask_package(model: str, url: str | None) -> ModelPrice | None:
    """Query `genai-prices` in a child: it takes 100 MB, which a conductor would hold for days."""
    if importlib.util.find_spec("genai_prices") is None:
        return None
    words = [sys.executable, "-m", "holdwater.gateway.prices", model, *([url] if url else [])]
    try:
        child = subprocess.run(
            words, capture_output=True, timeout=PATIENCE, env=build_python_environment(), check=True
        )
        return msgspec.json.decode(child.stdout, type=ModelPrice | None)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None  # unknown


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
