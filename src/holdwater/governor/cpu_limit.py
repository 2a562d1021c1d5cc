"""Limits the number of concurrent attempts by CPU. Pure: the measurements come from `cpu.py`.

The limit starts small and grows while there is spare CPU. When tasks wait for CPU and the run itself uses
much of it, the limit is lowered: running attempts continue, and fewer are started. A machine that is busy
with other work does not count against a run that uses little.
"""

from __future__ import annotations

import math

import msgspec

from ..core.records import Record

WINDOW_SECONDS = 2.0  # the period over which shares are measured
SETTLING_SECONDS = 10.0  # seconds before a lowered limit can be lowered again
STALLED_SHARE = 0.8  # share of time in which some task waits: crowded, if the run is above `BUSY_SHARE`
BUSY_SHARE = 0.5  # of the cores
FULL_SHARE = 0.95  # of the cores: crowded, even if no waiting is reported
SPARE_SHARE = 0.75  # of the cores: below it there is room for more
LOWERING_FACTOR = 0.75  # factor by which the limit is lowered
FIRST_PER_CORE = 2  # attempts for each core at the start
LEAST_FIRST = 4


class CpuUse(Record, frozen=True):
    """Cumulative measurements at one moment, in seconds."""

    at: float
    used: float  # CPU time of the run's workers and sandboxes
    stalled: float  # time in which some task waited


class CpuLimit(msgspec.Struct):
    """The limit on concurrent attempts."""

    cores: float
    most: int = 0
    crowded: bool = False
    _before: CpuUse | None = None
    _lowered: float = -SETTLING_SECONDS
    _learned: bool = False  # the limit was lowered once, and grows slowly since

    def __post_init__(self) -> None:
        self.most = self.most or max(LEAST_FIRST, math.ceil(FIRST_PER_CORE * self.cores))

    def update(self, now: CpuUse, running: int, waiting: bool) -> bool:
        """Update the limit; return whether it changed. `waiting`: attempts wait for this limit."""
        if self._before is None:
            self._before = now
        if (seconds := now.at - self._before.at) < WINDOW_SECONDS:
            return False
        busy = (now.used - self._before.used) / seconds / self.cores
        stalled = (now.stalled - self._before.stalled) / seconds
        self._before = now
        self.crowded = busy > FULL_SHARE or (stalled > STALLED_SHARE and busy > BUSY_SHARE)
        before = self.most
        if self.crowded:
            self._lower(now.at, running)
        elif waiting and busy < SPARE_SHARE:
            self.most += max(1, self.most // (8 if self._learned else 2))
        return self.most != before

    def _lower(self, now: float, running: int) -> None:
        """Lower the limit, at most once per settling time.

        Attempts beyond the limit have to end before it is lowered further.
        """
        least = max(2, math.ceil(self.cores))
        if now < self._lowered + SETTLING_SECONDS or running > self.most or running <= least:
            return
        self.most = max(least, int(min(self.most, running) * LOWERING_FACTOR))
        self._lowered, self._learned = now, True
