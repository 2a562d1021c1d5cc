"""Writes the run's timeline: a reading each second, from set-up to the end.

What is measured comes from the meter and the governor; what is drawn of it is in `view/timeline.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from ..core.errors import HoldwaterError
from ..core.summary import Gauge
from ..governor.meter import Meter
from ..governor.reading import Reading
from ..governor.room import Level
from ..ledger.ledger import Ledger
from ..rollout.duty import Duty
from ..rollout.lag import Lag
from .fleet import Census
from .footprint import Footprint
from .governor import Governor
from .scheduler import Scheduler
from .space import Space

SECONDS = 1.0
SPARING_SECONDS = 5.0  # between two readings that are written while the disk is full

T = TypeVar("T")


class Timeline:
    """One conductor's part of it."""

    def __init__(self, ledger: Ledger, space: Space) -> None:
        self._ledger = ledger
        self._space = space
        self._written = 0.0
        self.last: Gauge | None = None

    async def during(self, meter: Meter, set_up: Awaitable[T]) -> T:
        """What `set_up` gives. Meanwhile readings are written, though there is nothing to schedule yet."""
        footprint = Footprint()

        async def read() -> None:
            own = footprint.read(Census(workers=0))
            await self._write(meter.read(own), own)

        def note(kind: str, message: str) -> None:
            group.create_task(self._ledger.note(kind, message))

        error: HoldwaterError | None = None
        async with asyncio.TaskGroup() as group:
            await read()
            reading = group.create_task(Duty("gauge", SECONDS, read).perform(note))
            try:
                result = await set_up
            except HoldwaterError as raised:
                error = raised  # outside it is no group of errors
            reading.cancel()
        if error is not None:
            raise error
        return result

    def duty(self, scheduler: Scheduler, governor: Governor, lag: Lag) -> Duty:
        """Each second: what runs, what waits, memory and disk. A full disk is left to verdicts."""

        async def read() -> None:
            if self._space.level is Level.FULL and time.monotonic() < self._written + SPARING_SECONDS:
                return
            census = governor.census
            await self._write(
                governor.reading,
                governor.own,
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

        return Duty("gauge", SECONDS, read)

    async def _write(self, reading: Reading, memory: int, **more: Any) -> None:
        self._written = time.monotonic()
        disk = self._space.shown
        gauge = Gauge(
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
        await self._ledger.gauge(gauge)
