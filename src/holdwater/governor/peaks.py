"""What an attempt will need, learned from what attempts of this run have used. Pure."""

from __future__ import annotations

import bisect
from collections import deque

from ..core.records import MiB

PRIOR = 128 * MiB  # before anything is known
LEAST = 16 * MiB
SAMPLE = 512  # the latest peaks that count
ENOUGH = 16  # peaks after which the prior says nothing any more
QUANTILE = 0.8  # higher needs get their leases extended while they grow, or another try with more
MARGIN = 1.25


class Peaks:
    """The latest peaks."""

    def __init__(self, prior: int = PRIOR) -> None:
        self._prior = prior
        self._latest: deque[int] = deque()  # bound: `SAMPLE`, as the next
        self._sorted: list[int] = []

    def add(self, peak: int) -> None:
        self._latest.append(peak)
        bisect.insort(self._sorted, peak)
        if len(self._latest) > SAMPLE:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    @property
    def need(self) -> int:
        """Bytes for one more: a high quantile with a margin; with few peaks, more of the prior."""
        count = len(self._sorted)
        if not count:
            return self._prior
        high = self._sorted[min(count - 1, int(count * QUANTILE))] * MARGIN
        return max(LEAST, int(high), self._prior * max(0, ENOUGH - count) // ENOUGH)
