"""How a server is, as it says of itself: health, figures, and what its workers are asked for.

`stats.py` counts, `scaling.py` decides how many workers there are; this ties both to a run.
"""

from __future__ import annotations

import time

import msgspec

from ..core.serving import Health, Stats
from ..core.summary import Gauge
from ..rollout.duty import Duty
from .fleet import Attended, Condition
from .governor import Governor
from .scheduler import Scheduler
from .stats import Statistics
from .timeline import Timeline

SCALE_SECONDS = 0.2
COUNT_SECONDS = 1.0


class Service:
    """One server's."""

    def __init__(self, fleet: Attended, scheduler: Scheduler, governor: Governor, timeline: Timeline) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._governor = governor
        self._timeline = timeline
        self._up = False  # a worker has been ready
        self.draining = False
        self.counts = Statistics(time.time())

    async def begin(self) -> None:
        """What the run had before this server began."""
        counts = await self._scheduler.ledger.counts()
        self.counts = Statistics(time.time(), counts.outcomes)

    def health(self) -> Health:
        condition = self._fleet.condition()
        self._up = self._up or condition.ready > 0
        draining = self.draining or self._scheduler.draining
        state, reason = "draining" if draining else self._state(condition), self._reason(condition)
        waiting = self._scheduler.waiting
        return Health(
            ok=condition.ready > 0 and not draining,
            state=state,
            reason="it takes no more orders" if draining else reason,
            ready=condition.ready,
            wanted=condition.wanted,
            running=self._scheduler.running,
            waiting=sum(waiting.values()),
        )

    def stats(self, held: int, open_orders: int) -> Stats:
        gauge = msgspec.structs.replace(
            self._timeline.last or Gauge(at=time.time()),
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )
        return self.counts.stats(
            time.time(), self.health(), gauge, self._fleet.condition(), held, open_orders
        )

    def duties(self) -> tuple[Duty, ...]:
        return (
            Duty("scale", SCALE_SECONDS, self._scale),
            Duty("figures", COUNT_SECONDS, self._count),
        )

    async def _scale(self) -> None:
        waiting = self._scheduler.waiting.get("slot", 0)
        self._fleet.demand(self._scheduler.running, waiting, self._governor.room)

    async def _count(self) -> None:
        counts = await self._scheduler.ledger.counts()
        living = self._governor.census.usage
        self.counts.used(time.time(), counts.usage.plus(living), counts.saved)

    def _state(self, condition: Condition) -> str:
        if not condition.ready:
            return "broken" if self._up or condition.unfit else "starting"
        return "degraded" if condition.unfit or condition.ready < condition.wanted else "serving"

    def _reason(self, condition: Condition) -> str:
        if condition.unfit:
            return f"a worker cannot be started: {condition.unfit}"
        if condition.ready < condition.wanted:
            return f"{condition.ready} of {condition.wanted} workers are ready"
        return ""
