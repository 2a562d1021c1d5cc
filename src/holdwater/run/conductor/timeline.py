"""Writes the run's timeline: one reading each second, from set-up to the end.

The meter and the governor measure; `view/report.py` draws.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from ...core.errors import HoldwaterError
from ...core.summary import RunGauge
from ...governor.disk_room import DiskLevel
from ...governor.meter import ResourceMeter
from ...governor.resource_reading import ResourceReading
from ...ledger.ledger import Ledger
from ...rollout.lag import LoopLag
from ...rollout.periodic_task import PeriodicTask
from ..fleet.interface import FleetCensus
from ..resources.disk_space import DiskSpace
from ..resources.footprint import MemoryFootprint
from ..resources.governor import Governor
from .scheduler import AttemptScheduler

SECONDS = 1.0
SPARING_SECONDS = 5.0  # between two readings while the disk is full

T = TypeVar("T")


class TimelineWriter:
    """The part of the timeline that one conductor writes."""

    def __init__(self, ledger: Ledger, space: DiskSpace) -> None:
        self._ledger = ledger
        self._space = space
        self._written = 0.0
        self.last: RunGauge | None = None

    async def measure_setup(self, meter: ResourceMeter, set_up: Awaitable[T]) -> T:
        """Return the result of `set_up`; meanwhile write readings, although nothing is scheduled yet."""
        footprint = MemoryFootprint()

        async def read() -> None:
            own = footprint.read(FleetCensus(workers=0))
            await self._write(meter.read(own), own)

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

    def periodic_task(self, scheduler: AttemptScheduler, governor: Governor, lag: LoopLag) -> PeriodicTask:
        """Return the task that writes a reading each second; on a full disk rarely, in favour of verdicts."""

        async def read() -> None:
            if self._space.level is DiskLevel.FULL and time.monotonic() < self._written + SPARING_SECONDS:
                return
            census = governor.census
            await self._write(
                governor.reading,
                governor.own_memory,
                running=scheduler.running,
                waiting=scheduler.waiting,
                workers=census.workers,
                draining=census.draining,
                lag=max(governor.take_lag(), lag.take()),
                phases=census.phases,
                leased=governor.leased,
                sandboxes=census.sandboxes,
                binds=scheduler.binds,
            )

        return PeriodicTask("gauge", SECONDS, read)

    async def _write(self, reading: ResourceReading, memory: int, **more: Any) -> None:
        self._written = time.monotonic()
        disk = self._space.shown_disk
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
