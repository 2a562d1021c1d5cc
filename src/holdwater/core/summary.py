"""The state of a run for display: a reading of its progress, and the output of `show --json`."""

from __future__ import annotations

from msgspec import field

from .pass_rates import PassRate
from .records import NO_USAGE, ModelUsage, Record


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
    usage: ModelUsage = NO_USAGE
    cost: float | None = None  # US dollars; None: the cost of some calls is unknown
    saved: ModelUsage = NO_USAGE  # usage of replies that came from the record, at no cost
    started: float = 0.0
    ended: float | None = None
    seconds: float = 0.0  # total time of its conductors
    gauge: RunGauge | None = None
    lag_max: float = 0.0  # the longest event-loop lag of the run, in seconds
    events: dict[str, int] = field(default_factory=dict)  # kind -> count, for example `worker.lost`
    open: str = ""  # resources that sandboxes were not isolated from; empty: they were isolated
    regrade: RegradeState | None = None  # None: no sample was regraded
    refused: RefusedRequests | None = None  # None: every refused request belongs to an attempt
