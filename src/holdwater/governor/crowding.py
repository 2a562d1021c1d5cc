"""How many attempts the CPU bears at once. Pure: what is measured comes from `cpu.py`.

The limit begins small and grows as long as there is CPU to spare. When tasks wait for it and the run itself
uses much of it, the limit is lowered: what runs goes on, and fewer are started. A machine that is busy with
other work does not count against a run that uses little.
"""

from __future__ import annotations

import math

import msgspec

from ..core.records import Record

SECONDS = 2.0  # over which shares are taken
SETTLING = 10.0  # seconds that a lower limit has before it is lowered again
STALLED = 0.8  # of the time some task waits: crowded, if the run uses `MUCH`
MUCH = 0.5  # of the cores
ALL = 0.95  # of the cores: crowded, whatever is told of waiting
SPARE = 0.75  # of the cores: below it there is room for more
FEWER = 0.75  # times as many
FIRST = 2  # attempts a core to begin with
LEAST_FIRST = 4


class CpuUse(Record, frozen=True):
    """What was measured at one moment, in seconds: each figure only rises."""

    at: float
    used: float  # by the run's workers and sandboxes
    stalled: float  # some task waited


class CpuLimit(msgspec.Struct):
    """The most attempts at once."""

    cores: float
    most: int = 0
    crowded: bool = False
    _before: CpuUse | None = None
    _lowered: float = -SETTLING
    _learned: bool = False  # it has been lowered: it grows slowly from then on

    def __post_init__(self) -> None:
        self.most = self.most or max(LEAST_FIRST, math.ceil(FIRST * self.cores))

    def look(self, now: CpuUse, running: int, waiting: bool) -> bool:
        """Whether the limit is another one. `waiting`: attempts wait for it."""
        if self._before is None:
            self._before = now
        if (seconds := now.at - self._before.at) < SECONDS:
            return False
        busy = (now.used - self._before.used) / seconds / self.cores
        stalled = (now.stalled - self._before.stalled) / seconds
        self._before = now
        self.crowded = busy > ALL or (stalled > STALLED and busy > MUCH)
        before = self.most
        if self.crowded:
            self._lower(now.at, running)
        elif waiting and busy < SPARE:
            self.most += max(1, self.most // (8 if self._learned else 2))
        return self.most != before

    def _lower(self, now: float, running: int) -> None:
        """Once a while, and only from what runs: attempts that are over the limit have to end first."""
        least = max(2, math.ceil(self.cores))
        if now < self._lowered + SETTLING or running > self.most or running <= least:
            return
        self.most = max(least, int(min(self.most, running) * FEWER))
        self._lowered, self._learned = now, True
