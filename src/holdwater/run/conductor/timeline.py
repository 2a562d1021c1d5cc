"""Writes the run's timeline: one reading each second, from set-up to the end.

`governor/run_usage.py` measures; `view/report.py` draws.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ...core.errors import HoldwaterError
from ...core.summary import RunGauge
from ...governor.disks import DiskLevel
from ...governor.gate import PAUSE
from ...governor.leases import AttemptLeases
from ...governor.resource_reading import FleetCensus
from ...governor.run_usage import RunUsage
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ...rollout.process_health import LoopLag
from ..resources.disk_space import DiskSpace
from .scheduler import AttemptScheduler

SECONDS = 1.0
SPARING_SECONDS = 5.0  # between two readings while the disk is full

T = TypeVar("T")


class TimelineWriter:
    """The part of the timeline that one conductor writes."""

    def __init__(self, ledger: Ledger, usage: RunUsage, space: DiskSpace) -> None:
        self._ledger = ledger
        self._usage = usage
        self._space = space
        self._written = 0.0
        self.last: RunGauge | None = None

    async def measure_setup(self, set_up: Awaitable[T]) -> T:
        """Return the result of `set_up`; meanwhile write readings, although nothing is scheduled yet."""

        async def read() -> None:
            self._usage.measure(FleetCensus(workers=0))
            await self._write()

        def note(kind: str, message: str) -> None:
            group.create_task(self._ledger.note(kind, message))

        error: HoldwaterError | None = None
        async with asyncio.TaskGroup() as group:
            await read()
            reading = group.create_task(PeriodicTask("gauge", SECONDS, read).perform(note))
            try:
                result = await set_up
            except HoldwaterError as raised:
                error = raised  # re-raised outside the group, so that it is no exception group
            reading.cancel()
        if error is not None:
            raise error
        return result

    def periodic_task(
        self, scheduler: AttemptScheduler, leases: AttemptLeases, lag: LoopLag, count_held: Callable[[], int]
    ) -> PeriodicTask:
        """Return the task that writes a reading each second; on a full disk rarely, in favour of verdicts."""

        async def read() -> None:
            if self._space.level is DiskLevel.FULL and time.monotonic() < self._written + SPARING_SECONDS:
                return
            census = self._usage.census
            await self._write(
                running=scheduler.running,
                waiting=scheduler.waiting,
                workers=census.workers,
                draining=census.draining,
                lag=max(self._usage.take_lag(), lag.take()),
                phases=census.phases,
                leased=leases.leased,
                sandboxes=census.sandboxes,
                binds=_find_constraint(scheduler, leases, census),
                held=count_held(),
            )

        return PeriodicTask("gauge", SECONDS, read)

    async def _write(self, **more: Any) -> None:
        self._written = time.monotonic()
        reading, memory, disk = self._usage.reading, self._usage.own_memory, self._space.shown_disk
        gauge = RunGauge(
            at=time.time(),
            memory=memory,
            memory_limit=min(reading.bound.limit, memory + reading.bound.room),
            disk_free=disk.free,
            disk_total=disk.total,
            disk_used=self._space.used,
            disk_limit=self._space.budget or 0,
            pressure=reading.pressure,
            oom_kills=reading.oom_kills,
            bound=reading.bound.name,
            **more,
        )
        self.last = gauge
        await self._ledger.add_gauge(gauge)


def _find_constraint(scheduler: AttemptScheduler, leases: AttemptLeases, census: FleetCensus) -> str:
    """Return what keeps more attempts from running at once."""
    if scheduler.clock.paused:
        return PAUSE
    if leases.waiting:
        return leases.binds
    uses = census.uses.values()
    if uses and 2 * sum(use.throttled for use in uses) >= len(uses):
        return "rate"
    return "slots" if scheduler.plan.waiting.get("slot") else "nothing left to do"
