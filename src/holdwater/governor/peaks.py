"""Predicts the memory or disk of an attempt from the peaks of earlier attempts of this run. Pure."""

from __future__ import annotations

import bisect
from collections import deque

from ..core.records import MiB

KEPT_PEAKS = 512  # the latest peaks that are used
TRUSTED_PEAKS = 8  # number of peaks after which the prior has no weight
MARGIN = 1.1


class PeakHistory:
    """The latest peaks of one resource.

    `quantile` is the share of peaks that must fit: 1.0 if no limit stops an attempt that needs more, less
    if its lease is a limit that can grow.
    """

    def __init__(self, prior: int, least: int, quantile: float) -> None:
        self._prior = prior
        self._least = least
        self._quantile = quantile
        self._latest: deque[int] = deque()  # bound: `KEPT_PEAKS`, as the next
        self._sorted: list[int] = []

    def add(self, peak: int) -> None:
        self._latest.append(peak)
        bisect.insort(self._sorted, peak)
        if len(self._latest) > KEPT_PEAKS:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]

    @property
    def need(self) -> int:
        """Bytes for one more attempt: the quantile with a margin, and with few peaks a share of the prior."""
        count = len(self._sorted)
        if not count:
            return self._prior
        high = self._sorted[min(count - 1, int(count * self._quantile))]
        return max(
            self._least, int(high * MARGIN), self._prior * max(0, TRUSTED_PEAKS - count) // TRUSTED_PEAKS
        )

    @property
    def retry_need(self) -> int:
        """Initial bytes for an attempt whose lease was too small: never less than the prior."""
        return max(self._prior, self.need)


def sandbox_memory(limit: int) -> PeakHistory:
    """Return the history of sandbox memory.

    A lease is a limit for its sandbox and grows with it while there is room; `limit` is the total memory.
    """
    prior = min(max(limit // 16, 64 * MiB), 512 * MiB)
    return PeakHistory(prior=prior, least=2 * MiB, quantile=0.65)


def worker_memory() -> PeakHistory:
    """Return the history of worker memory per attempt.

    Attempts share the limit of their worker, so one that exceeds it hits the others: nearly all peaks must
    fit.
    """
    return PeakHistory(prior=8 * MiB, least=1 * MiB, quantile=0.95)


def sandbox_disk() -> PeakHistory:
    return PeakHistory(prior=64 * MiB, least=1 * MiB, quantile=0.95)
