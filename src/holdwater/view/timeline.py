"""Renders the timeline of a run as a line of small bars, and the limits of its concurrency. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..core.summary import RunGauge
from .formatting import size

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # bars


def memory_over_time(gauges: Sequence[RunGauge], width: int = WIDTH) -> str:
    """Return `▁▃▅▇▅▂ at most 318 MiB of 512 MiB`: each bar is the maximum of its part of the run."""
    if not gauges:
        return ""
    highest = max(gauges, key=lambda gauge: gauge.memory)
    limit = max(highest.memory_limit, highest.memory)
    line = bars([gauge.memory for gauge in gauges], limit, width)
    return f"{line} at most {size(highest.memory)} of {size(limit)}"


def bars(values: Sequence[float], most: float, width: int = WIDTH) -> str:
    """Return one bar for each of at most `width` equal parts of `values`; `most` is a full bar."""
    count = min(width, len(values))
    edges = [len(values) * number // count for number in range(count + 1)] if count else []
    highest = [max(values[a:b]) for a, b in pairwise(edges)]
    last = len(BARS) - 1
    return "".join(BARS[min(last, int(value / most * last + 0.5)) if most else 0] for value in highest)


def summarize_limits(gauges: Iterable[RunGauge]) -> str:
    """Return the share of time of each limit: `memory 62 %, slots 30 %, nothing left to do 8 %`."""
    counts = Counter(gauge.binds for gauge in gauges if gauge.binds)
    total = counts.total()
    return ", ".join(f"{name} {100 * n / total:.0f} %" for name, n in counts.most_common())
