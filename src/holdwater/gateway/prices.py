"""Finds the price of a model: in a TOML table first, then in the `genai-prices` package if it is installed.

`core/prices.py` computes costs from it. A run looks its model's price up once, when it is created, and keeps
it. `price_lookup.py` queries the package, in a separate process.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..core.environment import build_python_environment
from ..core.errors import BadInput
from ..core.prices import ModelPrice, find_price

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
        text = str(error)
        raise BadInput(f"{path}: `{pattern}`: {text[0].lower()}{text[1:]}", EXAMPLE) from None


def _ask_package(model: str, url: str | None) -> ModelPrice | None:
    """Query `genai-prices` in a child: it takes 100 MB, which a conductor would hold for days."""
    if importlib.util.find_spec("genai_prices") is None:
        return None
    words = [sys.executable, "-m", "holdwater.gateway.price_lookup", model, *([url] if url else [])]
    try:
        child = subprocess.run(
            words, capture_output=True, timeout=PATIENCE, env=build_python_environment(), check=True
        )
        return msgspec.json.decode(child.stdout, type=ModelPrice | None)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None  # unknown
