"""Decides how many workers a fleet has, by demand and free memory, and when a failed start is retried.

`workers.py` chooses the workers that are started and drained.
"""

from __future__ import annotations

from .config import RunConfig
from .failures import double_delay
from .records import Record

COMFORT = 0.8  # of the capacity with one worker fewer: above this load, no worker is spare
FIRST_PAUSE = 1.0  # seconds after a failed start; doubles
LONGEST_PAUSE = 30.0


class WorkerDemand(Record, frozen=True):
    """The load on the workers at one moment, and the cost of another one."""

    running: int  # attempts
    waiting: int  # attempts that wait for a slot
    workers: int  # wanted until now, without draining ones
    share: int  # attempts that a worker takes
    room: int  # bytes of memory that are free
    cost: int  # bytes that another worker takes
    idle: float = 0.0  # seconds for which one has been spare
    least: int = 1
    most: int = 1
    patience: float = 30.0  # seconds for which one must be spare before it is drained

    @property
    def needed(self) -> int:
        """The number of workers with a slot for every attempt."""
        return -(-(self.running + self.waiting) // self.share)

    @property
    def spare(self) -> bool:
        """Whether one worker fewer would suffice, with a margin against small changes in load."""
        comfortable = COMFORT * self.share * (self.workers - 1)
        return self.workers > self.least and self.running + self.waiting <= comfortable


def decide_workers(demand: WorkerDemand) -> int:
    """Return the wanted number: more at once, as memory allows; fewer one by one, after a quiet while."""
    if demand.needed > demand.workers:
        affordable = demand.workers + max(0, demand.room) // demand.cost
        return _clamp(min(demand.needed, affordable), demand)
    fewer = demand.spare and demand.idle >= demand.patience
    return _clamp(demand.workers - fewer, demand)


def _clamp(workers: int, demand: WorkerDemand) -> int:
    return min(demand.most, max(demand.least, workers))


class WorkerScaling:
    """Tracks how many workers are wanted, and since when one has been spare."""

    @classmethod
    def of(cls, config: RunConfig) -> WorkerScaling:
        """Return the scaling of a run: one worker for each open attempt at most; of a server: by demand."""
        share = -(-config.slots // max(1, config.workers))
        if config.serving is None:
            return cls(1, config.workers, share, 0.0)
        least = max(1, min(config.serving.least_workers, config.workers))
        return cls(least, config.workers, share, config.serving.quiet)

    def __init__(self, least: int, most: int, share: int, patience: float) -> None:
        self.wanted = least
        self._least = least
        self._most = most
        self._share = share
        self._patience = patience
        self._needed_at: float | None = None  # when all were last needed

    def admit(self, attempts: int) -> None:
        """Have a worker for each of a run's open attempts, up to the bound; their number never falls."""
        self.wanted = max(self.wanted, min(attempts, self._most))

    def update(self, at: float, running: int, waiting: int, room: int, cost: int) -> int:
        """Return how many workers are wanted from now on."""
        if self._needed_at is None:
            self._needed_at = at
        demand = WorkerDemand(
            running=running,
            waiting=waiting,
            workers=self.wanted,
            share=self._share,
            room=room,
            cost=cost,
            idle=at - self._needed_at,
            least=self._least,
            most=self._most,
            patience=self._patience,
        )
        before, self.wanted = self.wanted, decide_workers(demand)
        if self.wanted != before or not demand.spare:
            self._needed_at = at
        return self.wanted


class StartBackoff:
    """Tracks consecutive failures of workers to start: the reason, and when the next try is due."""

    def __init__(self, patient: bool) -> None:
        self._patient = patient  # waits between two tries, once any worker could be started
        self.ever_ready = False  # a worker has been ready
        self.failed = 0  # in a row
        self.unfit = ""  # why the last worker could not start, until one can
        self._due = 0.0

    def succeed(self) -> None:
        self.ever_ready, self.failed, self.unfit = True, 0, ""

    def fail(self, at: float, why: str) -> None:
        self.failed += 1
        self.unfit = why or "it could not be started"
        if self.ever_ready and self._patient:
            self._due = at + double_delay(FIRST_PAUSE, self.failed, LONGEST_PAUSE)

    def due(self, at: float) -> bool:
        """Return whether another start may be tried."""
        return not self.unfit or at >= self._due

    def hopeless(self, bound: int) -> bool:
        """Return whether to give up: a server that once had workers does not."""
        return self.failed >= bound and not (self.ever_ready and self._patient)
