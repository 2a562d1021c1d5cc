"""A run as it is shown: one reading of it in progress, and what `show --json` prints."""

from __future__ import annotations

from msgspec import field

from .pass_rates import PassRate
from .records import NO_USAGE, Record, Usage


class Gauge(Record, frozen=True):
    """One reading of a run in progress: what runs, what waits and why, memory and disk against limits."""

    at: float  # seconds since the epoch
    running: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # why -> attempts: `slot`, `back-off`, ...
    workers: int = 0
    draining: int = 0
    memory: int = 0  # bytes that conductor and workers use
    memory_limit: int = 0  # what they could use now, beside whoever shares the tightest limit with them
    disk_free: int = 0
    disk_total: int = 0
    disk_used: int = 0  # bytes of the run directory and scratch, where they have a budget
    disk_limit: int = 0  # that budget; 0: none
    lag: float = 0.0  # the longest event-loop lag of a worker or the conductor since the last reading
    phases: dict[str, int] = field(default_factory=dict)  # phase -> how many running attempts are in it
    pressure: float | None = None  # percent of the last 10 s in which some task waited for memory
    oom_kills: int = 0  # so far, of processes in our own control group
    bound: str = ""  # whose limit on memory is the tightest: `budget`, `container`, `pod`, `machine`
    leased: int = 0  # bytes of memory that attempts hold leases of
    sandboxes: int = 0  # bytes of memory that their sandboxes use
    # What keeps more from running: `slots`, `memory`, `disk`, `cpu`, `rate`, `nothing left to do`.
    binds: str = ""


class RegradeState(Record, frozen=True):
    """One regrade of a run. While it is open, the outcomes are still the old ones."""

    id: int
    grader: str
    only: tuple[str, ...] = ()  # patterns of instance ids; none: all of them
    started: float = 0.0  # seconds since the epoch
    ended: float | None = None  # None: it is open
    graded: int = 0  # samples with a new grade
    refused: int = 0  # samples whose outcome stays: their rows say why


class RefusedRequests(Record, frozen=True):
    """Requests that a gateway refused and that belong to no attempt."""

    events: int  # one for each kind of request, and one more for its count
    last: tuple[str, ...] = ()  # the latest ones in words, the oldest first


class Summary(Record, frozen=True):
    """What `show --json` prints: a run in a page."""

    run: str
    directory: str
    suite: str
    agent: str
    model: str | None
    state: str  # `running`, `finished`, `interrupted`, `stopped`, `unfinished` (its conductor is gone)
    reason: str = ""  # why it stopped
    network: str = ""  # what a sandbox reaches whose instance names nothing else
    replays: str | None = None  # the run whose recorded replies it was given
    exit_status: int | None = None
    planned: int = 0  # instances x samples that were pulled from the suite
    settled: int = 0
    total: int | None = None  # planned in the end, where the suite can tell
    outcomes: dict[str, int] = field(default_factory=dict)  # `passed`, `failed`, or a place -> samples
    attempts: int = 0
    verdicts: dict[str, int] = field(default_factory=dict)  # the same by attempt
    score: float | None = None  # mean over scored samples
    pass_at: tuple[PassRate, ...] = ()  # pass@1, pass@2, ... where `--samples` are several
    usage: Usage = NO_USAGE
    cost: float | None = None  # US dollars; None: the cost of some calls is unknown
    saved: Usage = NO_USAGE  # what was answered from the record and not used again
    started: float = 0.0
    ended: float | None = None
    seconds: float = 0.0  # time that conductors spent on it
    gauge: Gauge | None = None
    lag_max: float = 0.0  # the longest event-loop lag of the run, in seconds
    events: dict[str, int] = field(default_factory=dict)  # kind -> how many, for example `worker.lost`
    open: str = ""  # what sandboxes were not kept from; empty: they were isolated
    regrade: RegradeState | None = None  # None: every outcome was graded when its agent had acted
    refused: RefusedRequests | None = None  # None: each belongs to an attempt
