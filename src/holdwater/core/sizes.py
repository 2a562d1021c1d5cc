"""Parses sizes such as `512MiB`."""

from __future__ import annotations

import re

from .records import GiB, MiB

UNITS = {"": 1, "k": 1024, "m": MiB, "g": GiB, "t": 1024 * GiB}


def parse_size(text: str) -> int | None:
    """Return the bytes of `512MiB`, `8GiB`, `1.5g` or `1000000`; None if `text` is not a size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    return int(float(match[1]) * UNITS[match[2]]) if match else None
