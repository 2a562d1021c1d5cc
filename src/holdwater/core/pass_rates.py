"""pass@k of a run with several samples of each instance, with an interval over instances. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from .records import Record

Z = 1.959963984540054  # 95 % of a normal distribution lie within so many standard deviations

Scored = Mapping[tuple[int, int], int]
"""(scored samples, passed samples) -> instances that have so many."""


class PassRate(Record, frozen=True):
    """The chance that one of `k` samples passes: the mean over instances, and its 95 % interval."""

    k: int
    value: float
    low: float
    high: float
    instances: int  # those with at least `k` scored samples; others say nothing about this `k`


def pass_rates(scored: Scored) -> tuple[PassRate, ...]:
    """pass@1, pass@2 and so on, as far as an instance has samples for it."""
    most = max((samples for samples, _ in scored), default=0)
    return tuple(rate for k in range(1, most + 1) for rate in _at(k, scored))


def estimate_pass(samples: int, passed: int, k: int) -> float:
    """The unbiased estimator of pass@k for one instance: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def _at(k: int, scored: Scored) -> Iterator[PassRate]:
    fitting = {(n, c): count for (n, c), count in scored.items() if n >= k}
    instances = sum(fitting.values())
    if not instances:
        return
    estimates = [(estimate_pass(n, c, k), count) for (n, c), count in fitting.items()]
    mean = math.fsum(value * count for value, count in estimates) / instances
    spread = math.fsum(count * (value - mean) ** 2 for value, count in estimates) / max(1, instances - 1)
    samples = sum(n * count for (n, _), count in fitting.items())
    low, high = wilson(mean, _effective(mean, spread, instances, samples))
    yield PassRate(k=k, value=round(mean, 9), low=round(low, 9), high=round(high, 9), instances=instances)


def _effective(mean: float, spread: float, instances: int, samples: int) -> float:
    """How many independent passes or failures the instances are worth, by their own spread.

    Where all instances agree their spread says nothing, and each counts as one.
    """
    if spread <= 0.0:
        return instances
    return min(mean * (1.0 - mean) * instances / spread, samples)


def wilson(share: float, count: float) -> tuple[float, float]:
    """The score interval of a share of `count`: inside 0 and 1, and never empty."""
    centre = share + Z * Z / (2 * count)
    half = Z * math.sqrt(share * (1.0 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
