"""Where prices come from: a table in TOML first, then the `genai-prices` package where it is installed.

What they mean is in `core/prices.py`. A run takes its model's price once, when it is made, and keeps it. The
package is asked in `published.py`, by a process of its own.
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

from ..core.errors import BadInput
from ..core.helper_environment import build_python_environment
from ..core.prices import Price, find

PATIENCE = 30.0  # seconds
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
    """What `genai-prices` knows. It takes 100 MB, which a conductor would keep for days: a child asks it."""
    if importlib.util.find_spec("genai_prices") is None:
        return None
    words = [sys.executable, "-m", "holdwater.gateway.published", model, *([url] if url else [])]
    try:
        child = subprocess.run(
            words, capture_output=True, timeout=PATIENCE, env=build_python_environment(), check=True
        )
        return msgspec.json.decode(child.stdout, type=Price | None)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
        return None  # unknown
