"""How long a test waits: long, and longer on a busy machine.

A bound says when a test gives up on an event. It is never a measurement.
"""

from __future__ import annotations

import os

LEAST = 4.0  # times the seconds of a quiet machine: a load can come within a wait
MOST = 16.0  # some tests let such a bound pass, beside bounds of the product that do not grow


def stretch(seconds: float) -> float:
    """The bound for something that takes at most `seconds` on a quiet machine."""
    return seconds * min(MOST, max(LEAST, 2 * os.getloadavg()[0] / len(os.sched_getaffinity(0))))
