"""How long a test waits: long, and longer on a busy machine.

A bound says when a test gives up on an event. It is never a measurement.
"""

from __future__ import annotations

import os

LEAST = 4.0  # times the seconds of a quiet machine: a load can come within a wait


def stretch(seconds: float) -> float:
    """The bound for something that takes at most `seconds` on a quiet machine."""
    return seconds * max(LEAST, 2 * os.getloadavg()[0] / len(os.sched_getaffinity(0)))
