"""Counts a server's work in figures whose memory does not grow with time.

Time comes as an argument, in seconds since the epoch. `metrics.py` renders the figures for Prometheus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from ...core.records import NO_USAGE, ModelUsage
from ...core.serving_protocol import ServerHealth, ServerStats
from ...core.summary import RunGauge
from ..fleet.interface import FleetCondition

WINDOW = 60  # seconds that a rate covers
RECENT = 1024  # recent values that percentiles are computed from
PERCENTILES = (50, 90, 95, 99)
DIP_SECONDS = 5.0  # between the end of an attempt and its commit, its usage is not counted anywhere


class ServerStatistics:
    """The statistics of one server."""

    def __init__(self, at: float, rollouts: Mapping[str, int] | None = None) -> None:
        """`rollouts`: outcomes that the run had before this server began."""
        self._began = at
        self._orders: Counter[str] = Counter()  # bound: the codes of `ProblemDetails`
        self._rollouts: Counter[str] = Counter(rollouts or {})  # bound: the kinds of outcomes
        self._finished, self._turns, self._tokens = RollingRate(at), RollingRate(at), RollingRate(at)
        self._latency, self._waited = RecentValues(), RecentValues()
        self._most: ModelUsage | None = None  # the highest usage seen; anything above it is new
        self._dipped: float | None = None  # since when the usage is lower
        self._usage = self._saved = NO_USAGE

    def count_order(self) -> None:
        self._orders["accepted"] += 1

    def count_refusal(self, code: str) -> None:
        """`code`: the code of the `ProblemDetails`."""
        self._orders["refused"] += 1
        self._orders[f"refused.{code}"] += 1

    def count_start(self, waited: float) -> None:
        """Count a rollout that started `waited` seconds after its order."""
        self._waited.add(waited)

    def count_finish(self, at: float, latency: float, outcome: str) -> None:
        """Count a rollout that ended `latency` seconds after its order."""
        self._rollouts[outcome] += 1
        self._finished.add(at, 1)
        self._latency.add(latency)

    def record_usage(self, at: float, usage: ModelUsage, saved: ModelUsage = NO_USAGE) -> None:
        """Record the usage of all model calls of the run so far, of settled and living attempts."""
        self._usage, self._saved = usage, saved
        most = self._most or usage
        if usage.requests < most.requests:
            self._dipped = self._dipped if self._dipped is not None else at
            if at - self._dipped < DIP_SECONDS:
                return
            most = usage  # the usage of a lost worker's attempts does not come back
        self._turns.add(at, usage.requests - most.requests)
        self._tokens.add(at, max(0, usage.tokens - most.tokens))
        self._most, self._dipped = usage, None

    def snapshot(
        self,
        at: float,
        health: ServerHealth,
        gauge: RunGauge,
        condition: FleetCondition,
        held: int = 0,
        open: int = 0,
    ) -> ServerStats:
        """Return all figures. `held`: calls that wait for an answer; `open`: orders that are not finished."""
        return ServerStats(
            at=at,
            uptime=max(0.0, at - self._began),
            health=health,
            orders={"open": open, **self._orders},
            rollouts=dict(self._rollouts),
            running=gauge.running,
            waiting=gauge.waiting,
            rollouts_per_second=self._finished.per_second(at),
            turns_per_second=self._turns.per_second(at),
            tokens_per_second=self._tokens.per_second(at),
            latency=self._latency.percentiles(),
            waited=self._waited.percentiles(),
            held=held,
            usage=self._usage,
            saved=self._saved,
            workers=condition.ready + condition.starting + condition.draining,
            draining=condition.draining,
            lost=condition.lost,
            recycled=condition.recycled,
            lag=gauge.lag,
            memory=gauge.memory,
            memory_limit=gauge.memory_limit,
            disk_free=gauge.disk_free,
        )


class RollingRate:
    """The rate per second over the last minute, from one counter for each second."""

    def __init__(self, at: float) -> None:
        self._began = at
        self._counts = [0] * WINDOW
        self._last = int(at)  # the second that was counted last

    def add(self, at: float, count: int) -> None:
        self._advance(int(at))
        self._counts[self._last % WINDOW] += count

    def per_second(self, at: float) -> float:
        self._advance(int(at))
        return sum(self._counts) / min(WINDOW, max(1.0, at - self._began))

    def _advance(self, second: int) -> None:
        """Reset the counters older than the window. When the clock is set back, the last second counts."""
        for passed in range(max(self._last, second - WINDOW) + 1, second + 1):
            self._counts[passed % WINDOW] = 0
        self._last = max(self._last, second)


class RecentValues:
    """The most recent values and their percentiles."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        self._values.append(max(0.0, value))

    def percentiles(self) -> dict[str, float]:
        """Return the percentiles; empty while there are no values."""
        values = sorted(self._values)
        ranks = {p: -(-len(values) * p // 100) for p in PERCENTILES}  # the nearest rank
        return {f"p{p}": values[rank - 1] for p, rank in ranks.items() if values}
