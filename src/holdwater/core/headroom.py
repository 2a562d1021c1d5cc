"""How much of a disk is kept free for what runs already. Pure."""

from __future__ import annotations

from .records import MiB

MOST = 128 * MiB
LEAST = 2 * MiB
PART = 50  # of a small disk or budget, the part that is


def headroom(total: int) -> int:
    """Bytes of a disk of `total` bytes."""
    return min(MOST, max(LEAST, total // PART))
