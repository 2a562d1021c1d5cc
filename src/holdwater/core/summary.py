"""The state of a run for display: a reading of its progress, pass@k, and the output of `show --json`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from msgspec import field

from .endpoints import EndpointUse
from .fork_origin import ForkOrigin
from .records import NO_USAGE, ModelUsage, Record

Z = 1.959963984540054  # 95 % of a normal distribution are within so many standard deviations

WILSON = "Wilson's interval"
TRANSLATED = "model.translated"  # the event that calls of a dialect go to the server in another one
LEFT_OUT = "model.left-out"  # the event that fields of such calls are left out

PassCounts = Mapping[tuple[int, int], int]
"""(scored samples, passed samples) -> number of instances with these counts."""


class PassRate(Record, frozen=True):
    """The probability that one of `k` samples passes: the mean over instances, and its 95 % interval."""

    k: int
    value: float
    low: float
    high: float
    instances: int  # instances with at least `k` scored samples; only these count for this `k`
    method: str = WILSON  # by which the interval was made


class RunGauge(Record, frozen=True):
    """One reading of a run in progress: running and waiting attempts, memory and disk against limits."""

    at: float  # seconds since the epoch
    running: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # reason -> attempts: `slot`, `back-off`, ...
    workers: int = 0
    draining: int = 0
    memory: int = 0  # bytes that conductor and workers use
    memory_limit: int = 0  # bytes that they could use now, given the other users of the tightest limit
    disk_free: int = 0
    disk_total: int = 0
    disk_used: int = 0  # bytes of the run directory and scratch, if they have a budget
    disk_limit: int = 0  # that budget; 0: none
    lag: float = 0.0  # the longest event-loop lag of a worker or the conductor since the last reading
    phases: dict[str, int] = field(default_factory=dict)  # phase -> running attempts in it
    pressure: float | None = None  # percent of the last 10 s in which some task waited for memory
    oom_kills: int = 0  # OOM kills so far in our own control group
    bound: str = ""  # source of the tightest memory limit: `budget`, `container`, `pod`, `machine`
    leased: int = 0  # bytes of memory leased to attempts
    sandboxes: int = 0  # bytes of memory in use by their sandboxes
    # The constraint on starting more attempts: `slots`, `memory`, `disk`, `cpu`, `rate`, `nothing left to
    # do`.
    binds: str = ""
    held: int = 0  # model calls that wait for an answer of a trainer


class RegradeState(Record, frozen=True):
    """One regrade of a run. While it is open, the outcomes are still the old ones."""

    id: int
    grader: str
    only: tuple[str, ...] = ()  # patterns of instance ids; empty: all instances
    started: float = 0.0  # seconds since the epoch
    ended: float | None = None  # None: it is still open
    graded: int = 0  # samples with a new grade
    refused: int = 0  # samples whose outcome is unchanged: their rows have the reason


class RefusedRequests(Record, frozen=True):
    """Requests that a gateway refused and that belong to no attempt."""

    events: int  # one for each kind of request, and one more for its count
    last: tuple[str, ...] = ()  # descriptions of the latest ones, the oldest first


class RunPause(Record, frozen=True):
    """The pause of a run."""

    since: float  # seconds since the epoch
    by: str  # who requested it


class ControlEvent(Record, frozen=True):
    """A request to the running run, such as a pause or a note."""

    at: float  # seconds since the epoch
    verb: str
    message: str


class RunSummary(Record, frozen=True):
    """The output of `show --json`: a run on one page."""

    run: str
    directory: str
    suite: str
    agent: str
    model: str | None
    state: str  # `running`, `finished`, `interrupted`, `stopped`, `unfinished` (its conductor is gone)
    reason: str = ""  # why it stopped
    network: str = ""  # network access of sandboxes whose instance sets none
    replays: str | None = None  # the run whose recorded replies were replayed
    fork: ForkOrigin | None = None  # the attempt that all attempts repeated up to a turn
    exit_status: int | None = None
    planned: int = 0  # instances x samples that were pulled from the suite
    settled: int = 0
    total: int | None = None  # expected final value of `planned`, if the suite knows its size
    # `passed`, `failed`, or a failure origin -> samples.
    outcomes: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)  # the same, counted by attempt
    score: float | None = None  # mean over scored samples
    pass_at: tuple[PassRate, ...] = ()  # pass@1, pass@2, ... if `--samples` is more than 1
    endpoints: tuple[EndpointUse, ...] = ()  # the model's servers, if there are several
    usage: ModelUsage = NO_USAGE
    cost: float | None = None  # US dollars; None: the cost of some calls is unknown
    saved: ModelUsage = NO_USAGE  # usage of replies that came from the record, at no cost
    started: float = 0.0
    ended: float | None = None
    seconds: float = 0.0  # total time of its conductors, without pauses
    gauge: RunGauge | None = None
    lag_max: float = 0.0  # the longest event-loop lag of the run, in seconds
    events: dict[str, int] = field(default_factory=dict)  # kind -> count, for example `worker.lost`
    open: str = ""  # resources that sandboxes were not isolated from; empty: they were isolated
    regrade: RegradeState | None = None  # None: no sample was regraded
    refused: RefusedRequests | None = None  # None: every refused request belongs to an attempt
    translated: tuple[str, ...] = ()  # which dialects go to the server as which one, and without which fields
    paused: RunPause | None = None  # only while the run is running
    control: tuple[ControlEvent, ...] = ()  # the last requests that changed the running run, the oldest first


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
