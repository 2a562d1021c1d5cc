"""pass@k of a run with several samples of each instance, with a confidence interval over instances. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .records import Record

Z = 1.959963984540054  # 95 % of a normal distribution are within so many standard deviations

PassCounts = Mapping[tuple[int, int], int]
"""(scored samples, passed samples) -> number of instances with these counts."""


class PassRate(Record, frozen=True):
    """The probability that one of `k` samples passes: the mean over instances, and its 95 % interval."""

    k: int
    value: float
    low: float
    high: float
    instances: int  # instances with at least `k` scored samples; only these count for this `k`


def compute_pass_rates(scored: PassCounts) -> tuple[PassRate, ...]:
    """Return pass@1, pass@2 and so on, up to the largest number of samples of an instance."""
    most = max((samples for samples, _ in scored), default=0)
    return tuple(rate for k in range(1, most + 1) for rate in _estimate_at(k, scored))


def estimate_pass(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one instance: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def _estimate_at(k: int, scored: PassCounts) -> Iterator[PassRate]:
    fitting = {(n, c): count for (n, c), count in scored.items() if n >= k}
    instances = sum(fitting.values())
    if not instances:
        return
    estimates = [(estimate_pass(n, c, k), count) for (n, c), count in fitting.items()]
    mean = math.fsum(value * count for value, count in estimates) / instances
    spread = math.fsum(count * (value - mean) ** 2 for value, count in estimates) / max(1, instances - 1)
    samples = sum(n * count for (n, _), count in fitting.items())
    low, high = wilson_interval(mean, _count_effective(mean, spread, instances, samples))
    yield PassRate(k=k, value=round(mean, 9), low=round(low, 9), high=round(high, 9), instances=instances)


def _count_effective(mean: float, spread: float, instances: int, samples: int) -> float:
    """Return the number of independent trials that the instances are worth, by their own spread.

    If all instances agree, their spread carries no information, and each counts as one.
    """
    if spread <= 0.0:
        return instances
    return min(mean * (1.0 - mean) * instances / spread, samples)


def wilson_interval(share: float, count: float) -> tuple[float, float]:
    """Return the score interval of a share of `count`: within 0 and 1, and never empty."""
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1.0 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
