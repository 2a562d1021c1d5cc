"""Ties the governor's parts to a run: each second it measures, grants, extends and, in need, reclaims.

What is decided is decided in `governor/`; this carries it out on the fleet.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ..core.config import RunConfig
from ..core.failures import interrupted
from ..core.records import Ask, Attempt, Failure, Verdict
from ..governor.gate import Gate
from ..governor.meter import Meter
from ..governor.peaks import Peaks
from ..governor.processes import use_of
from ..governor.reading import Reading
from ..governor.reclaim import Action, Reclaim
from .fleet import Census, Fleet

NEARLY = 0.75  # of a lease: from here on it is extended, if there is room
GROWTH = 1.5


class Governor:
    """One run's. With `--ungoverned` it measures and leaves it at that."""

    def __init__(
        self,
        config: RunConfig,
        meter: Meter,
        preempt: Callable[[int], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._preempt = preempt
        self._meter = meter
        self._note = note
        self._gate = Gate()
        self._peaks = Peaks()
        self._highest: dict[int, int] = {}  # attempt -> the most that it was seen to use; bound: concurrency
        self._reclaim = Reclaim()
        self.reading = meter.read(sum(use_of((os.getpid(),)).values()))
        self._gate.measured(self.reading.bounds, {})

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot and no lease yet."""
        return self._gate.waiting

    @property
    def held(self) -> set[str]:
        """Why nobody is admitted now."""
        return self._gate.held

    def hold(self, why: str) -> None:
        self._gate.hold(why)

    def release(self, why: str) -> None:
        self._gate.release(why)

    def drop(self, attempt: int, reason: str) -> bool:
        """Let an attempt that waits go; whether it did wait."""
        return self._gate.drop(attempt, interrupted(reason))

    async def lease(self, attempt: Attempt, asks: Ask) -> int | Failure:
        """Wait for an attempt's memory: its lease in bytes (0: none is kept), or why it cannot be had."""
        need = 0 if self._config.ungoverned else self.need(attempt, asks)  # 0: it waits for no memory
        return await self._gate.take(attempt.id, need) or need

    def need(self, attempt: Attempt, asks: Ask) -> int:
        declared = asks.memory or self._config.limits.memory
        return (declared or self._peaks.need) * attempt.scale

    def settled(self, verdict: Verdict) -> None:
        """Its lease returns; what it used is learned from."""
        seen = self._highest.pop(verdict.attempt, 0)
        if seen:
            self._peaks.add(seen)
        self._gate.give(verdict.attempt)

    def measure(self, fleet: Fleet) -> tuple[Census, Reading, int]:
        """One look at everything; what follows from it is done."""
        census = fleet.census()
        used = census.memory
        own = sum(use_of((os.getpid(), *census.pids)).values()) + census.sandboxes
        self.reading = reading = self._meter.read(own)
        for attempt, bytes_ in used.items():
            self._highest[attempt] = max(bytes_, self._highest.get(attempt, 0))
        if not self._config.ungoverned:
            self._gate.measured(reading.bounds, used)
            self._extend(census, fleet)
            self._relieve(census, reading, fleet)
        return census, reading, own

    def _extend(self, census: Census, fleet: Fleet) -> None:
        for attempt, used in census.memory.items():
            lease = self._gate.lease(attempt)
            if lease and used > NEARLY * lease and self._gate.extend(attempt, int(lease * GROWTH)):
                fleet.allow(attempt, int(lease * GROWTH))

    def _relieve(self, census: Census, reading: Reading, fleet: Fleet) -> None:
        bound = reading.bound
        action = self._reclaim.next(bound.used, bound.limit)
        (self.hold if self._reclaim.holding else self.release)("memory")
        if action is None:
            return
        if done := self._take_step(action, fleet):
            use = f"{bound.used >> 20} of {bound.limit >> 20} MiB ({bound.name})"
            self._note(f"governor.{action}", f"{use}: {done}")

    def _take_step(self, action: Action, fleet: Fleet) -> str:
        match action:
            case Action.TRIM:
                return fleet.trim()
            case Action.RECYCLE:
                return fleet.recycle()
            case Action.PREEMPT:
                attempt = fleet.youngest()
                if attempt is None:
                    return ""
                self._preempt(attempt)
                return f"attempt {attempt}, the youngest, is tried again later"
