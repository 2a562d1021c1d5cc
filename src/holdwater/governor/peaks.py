"""What an attempt will need, learned from the most that attempts of this run have used. Pure."""

from __future__ import annotations

import bisect
from collections import deque

from ..core.records import MiB

SAMPLE = 512  # the latest peaks that count
ENOUGH = 8  # peaks after which the prior says nothing any more
MARGIN = 1.1


class Peaks:
    """The latest peaks of one resource.

    `quantile` is how many of them must fit: 1.0 where nothing stops an attempt that needs more, less where
    its lease is a limit that can grow.
    """

    def __init__(self, prior: int, least: int, quantile: float) -> None:
        self._prior = prior
        self._least = least
        self._quantile = quantile
        self._latest: deque[int] = deque()  # bound: `SAMPLE`, as the next
        self._sorted: list[int] = []

    def add(self, peak: int) -> None:
        self._latest.append(peak)
        bisect.insort(self._sorted, peak)
        if len(self._latest) > SAMPLE:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    @property
    def need(self) -> int:
        """Bytes for one more: the quantile with a margin; while peaks are few, more of the prior."""
        count = len(self._sorted)
        if not count:
            return self._prior
        high = self._sorted[min(count - 1, int(count * self._quantile))]
        return max(self._least, int(high * MARGIN), self._prior * max(0, ENOUGH - count) // ENOUGH)

    @property
    def more(self) -> int:
        """Bytes to begin with for one whose lease was too small: never less than the prior."""
        return max(self._prior, self.need)


def sandbox_memory(limit: int) -> Peaks:
    """A sandbox is held to its lease, which grows with it while there is room; `limit` is all there is."""
    prior = min(max(limit // 16, 64 * MiB), 512 * MiB)
    return Peaks(prior=prior, least=2 * MiB, quantile=0.65)


def worker_memory() -> Peaks:
    """An attempt shares its worker's limit with others, who would be hit too: nearly all that was seen."""
    return Peaks(prior=8 * MiB, least=1 * MiB, quantile=0.95)


def sandbox_disk() -> Peaks:
    return Peaks(prior=64 * MiB, least=1 * MiB, quantile=0.95)
