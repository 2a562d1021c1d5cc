"""What a server has done, in figures that take the same memory on the first day and the tenth.

Time comes as an argument, in seconds since the epoch. `metrics.py` says the same to Prometheus.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from ..core.records import NO_USAGE, Usage
from ..core.serving import Health, Stats
from ..core.summary import Gauge
from .fleet import Condition

WINDOW = 60  # seconds that a rate is taken over
RECENT = 1024  # values that percentiles are taken of: the last ones
PERCENTILES = (50, 90, 95, 99)
DIP_SECONDS = 5.0  # between the end of an attempt and its commit its usage is counted nowhere


class Statistics:
    """One server's."""

    def __init__(self, at: float, rollouts: Mapping[str, int] | None = None) -> None:
        """`rollouts`: by outcome, what the run had before this server began."""
        self._began = at
        self._orders: Counter[str] = Counter()  # bound: the codes of `Problem`
        self._rollouts: Counter[str] = Counter(rollouts or {})  # bound: the places of failures
        self._finished, self._turns, self._tokens = Rate(at), Rate(at), Rate(at)
        self._latency, self._waited = Recent(), Recent()
        self._most: Usage | None = None  # that was seen: from there on it is new
        self._dipped: float | None = None  # since when there is less
        self._usage = self._saved = NO_USAGE

    def ordered(self) -> None:
        self._orders["accepted"] += 1

    def refused(self, code: str) -> None:
        """`code`: the `Problem`'s."""
        self._orders["refused"] += 1
        self._orders[f"refused.{code}"] += 1

    def started(self, waited: float) -> None:
        """A rollout began, so many seconds after its order."""
        self._waited.add(waited)

    def finished(self, at: float, latency: float, outcome: str) -> None:
        """A rollout ended, so many seconds after its order."""
        self._rollouts[outcome] += 1
        self._finished.add(at, 1)
        self._latency.add(latency)

    def used(self, at: float, usage: Usage, saved: Usage = NO_USAGE) -> None:
        """What all model calls of the run have used by now: settled attempts' and living ones'."""
        self._usage, self._saved = usage, saved
        most = self._most or usage
        if usage.requests < most.requests:
            self._dipped = self._dipped if self._dipped is not None else at
            if at - self._dipped < DIP_SECONDS:
                return
            most = usage  # what a lost worker's attempts had used does not come back
        self._turns.add(at, usage.requests - most.requests)
        self._tokens.add(at, max(0, usage.tokens - most.tokens))
        self._most, self._dipped = usage, None

    def stats(
        self, at: float, health: Health, gauge: Gauge, condition: Condition, held: int = 0, open: int = 0
    ) -> Stats:
        """All of it now. `held`: calls that wait for an answer; `open`: orders that are not over."""
        return Stats(
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


class Rate:
    """How many a second, over the last minute: a counter for each second of it."""

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
        """Forget what is older than the window. A clock that is set back counts into the last second."""
        for passed in range(max(self._last, second - WINDOW) + 1, second + 1):
            self._counts[passed % WINDOW] = 0
        self._last = max(self._last, second)


class Recent:
    """The last values, and how they are spread."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        self._values.append(max(0.0, value))

    def percentiles(self) -> dict[str, float]:
        """Nothing while there are no values."""
        values = sorted(self._values)
        ranks = {p: -(-len(values) * p // 100) for p in PERCENTILES}  # the nearest rank
        return {f"p{p}": values[rank - 1] for p, rank in ranks.items() if values}
