"""Sizes in bytes: parses `512MiB`, and computes how much of a disk is kept free for running attempts."""

from __future__ import annotations

import re

MiB = 1024 * 1024
GiB = 1024 * MiB
MOST_HEADROOM = 128 * MiB
LEAST_HEADROOM = 2 * MiB
HEADROOM_PART = 50  # a small disk or budget keeps one part in this many free
UNITS = {"": 1, "k": 1024, "m": MiB, "g": GiB, "t": 1024 * GiB}


def parse_size(text: str) -> int | None:
    """Return the bytes of `512MiB`, `8GiB`, `1.5g` or `1000000`; None if `text` is not a size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    return int(float(match[1]) * UNITS[match[2]]) if match else None


def compute_headroom(total: int) -> int:
    """Return the bytes to keep free on a disk of `total` bytes."""
    return min(MOST_HEADROOM, max(LEAST_HEADROOM, total // HEADROOM_PART))
