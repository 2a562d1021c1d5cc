"""Sizes as people write them."""

from __future__ import annotations

import re

from .records import GiB, MiB

UNITS = {"": 1, "k": 1024, "m": MiB, "g": GiB, "t": 1024 * GiB}


def bytes_of(text: str) -> int | None:
    """`512MiB`, `8GiB`, `1.5g`, `1000000`: a number of bytes; None for what is no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    return int(float(match[1]) * UNITS[match[2]]) if match else None
