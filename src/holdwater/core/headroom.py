"""The part of a disk that is kept free for attempts that are running. Pure."""

from __future__ import annotations

from .records import MiB

MOST_HEADROOM = 128 * MiB
LEAST_HEADROOM = 2 * MiB
HEADROOM_PART = 50  # a small disk or budget keeps one part in this many free


def compute_headroom(total: int) -> int:
    """Return the bytes to keep free on a disk of `total` bytes."""
    return min(MOST_HEADROOM, max(LEAST_HEADROOM, total // HEADROOM_PART))
