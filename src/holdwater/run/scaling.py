"""How many workers a server has, by what is asked of it and the memory that is free; when one is tried again.

Pure: time comes as an argument. Who starts and drains workers is in `local.py`.
"""

from __future__ import annotations

from ..core.records import Record

COMFORT = 0.8  # of what one worker fewer takes: with more than that to do, none is spare
FIRST_PAUSE = 1.0  # seconds after a worker that could not start; doubles
LONGEST_PAUSE = 30.0


class Demand(Record, frozen=True):
    """What is asked of the workers at one moment, and what they cost."""

    running: int  # attempts
    waiting: int  # the same, for a place
    workers: int  # wanted until now; those that drain are not among them
    share: int  # attempts that a worker takes
    room: int  # bytes of memory that are free
    cost: int  # bytes that another worker takes
    idle: float = 0.0  # seconds for which one has been spare
    least: int = 1
    most: int = 1
    patience: float = 30.0  # seconds for which one must be spare before it goes

    @property
    def needed(self) -> int:
        """Workers that have a place for everything."""
        return -(-(self.running + self.waiting) // self.share)

    @property
    def spare(self) -> bool:
        """Whether one worker fewer would do, and comfortably: what comes and goes must not sway it."""
        comfortable = COMFORT * self.share * (self.workers - 1)
        return self.workers > self.least and self.running + self.waiting <= comfortable


def wanted(demand: Demand) -> int:
    """More at once, as far as memory allows; fewer one by one, each after a quiet while."""
    if demand.needed > demand.workers:
        affordable = demand.workers + max(0, demand.room) // demand.cost
        return _within(min(demand.needed, affordable), demand)
    fewer = demand.spare and demand.idle >= demand.patience
    return _within(demand.workers - fewer, demand)


def _within(workers: int, demand: Demand) -> int:
    return min(demand.most, max(demand.least, workers))


class Scaling:
    """How many workers are wanted now, and since when one has been spare."""

    def __init__(self, least: int, most: int, share: int, patience: float) -> None:
        self.wanted = least
        self._least = least
        self._most = most
        self._share = share
        self._patience = patience
        self._needed_at: float | None = None  # when all were needed last

    def look(self, at: float, running: int, waiting: int, room: int, cost: int) -> int:
        """How many are wanted from now on."""
        if self._needed_at is None:
            self._needed_at = at
        demand = Demand(
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
        before, self.wanted = self.wanted, wanted(demand)
        if self.wanted != before or not demand.spare:
            self._needed_at = at
        return self.wanted


class Births:
    """Workers that could not start, one after another: why, and when the next one may be tried."""

    def __init__(self, patient: bool) -> None:
        self._patient = patient  # it waits between two tries, once any worker could be started
        self.any = False  # a worker has been ready
        self.failed = 0  # in a row
        self.unfit = ""  # why the last one could not start, until one can
        self._due = 0.0

    def succeed(self) -> None:
        self.any, self.failed, self.unfit = True, 0, ""

    def fail(self, at: float, why: str) -> None:
        self.failed += 1
        self.unfit = why or "it could not be started"
        if self.any and self._patient:
            self._due = at + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failed - 1, 10))

    def due(self, at: float) -> bool:
        """Whether another one may be tried."""
        return not self.unfit or at >= self._due

    def hopeless(self, bound: int) -> bool:
        """Whether to give up: a server that has once had workers does not."""
        return self.failed >= bound and not (self.any and self._patient)
