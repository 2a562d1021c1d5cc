"""Reports a server's health and statistics, and passes the demand for workers to the fleet.

`stats.py` counts, `run/fleet/scaling.py` decides the number of workers; this module connects both to a run.
"""

from __future__ import annotations

import time

import msgspec

from ...core.serving_protocol import ServerHealth, ServerStats
from ...core.summary import RunGauge
from ...rollout.periodic_task import PeriodicTask
from ..conductor.scheduler import AttemptScheduler
from ..conductor.timeline import TimelineWriter
from ..fleet.interface import FleetCondition, ServingFleet
from ..resources.governor import Governor
from .stats import ServerStatistics

SCALE_SECONDS = 0.2
COUNT_SECONDS = 1.0


class ServerStatus:
    """The status of one server."""

    def __init__(
        self, fleet: ServingFleet, scheduler: AttemptScheduler, governor: Governor, timeline: TimelineWriter
    ) -> None:
        self._fleet = fleet
        self._scheduler = scheduler
        self._governor = governor
        self._timeline = timeline
        self._ever_ready = False  # a worker has been ready
        self.draining = False
        self.statistics = ServerStatistics(time.time())

    async def begin(self) -> None:
        """Load the outcomes that the run had before this server began."""
        counts = await self._scheduler.ledger.counts()
        self.statistics = ServerStatistics(time.time(), counts.outcomes)

    def health(self) -> ServerHealth:
        condition = self._fleet.condition()
        self._ever_ready = self._ever_ready or condition.ready > 0
        draining = self.draining or self._scheduler.draining
        state, reason = (
            "draining" if draining else self._describe_state(condition),
            self._explain_state(condition),
        )
        waiting = self._scheduler.waiting
        return ServerHealth(
            ok=condition.ready > 0 and not draining,
            state=state,
            reason="it accepts no more orders" if draining else reason,
            ready=condition.ready,
            wanted=condition.wanted,
            running=self._scheduler.running,
            waiting=sum(waiting.values()),
        )

    def stats(self, held: int, open_orders: int) -> ServerStats:
        gauge = msgspec.structs.replace(
            self._timeline.last or RunGauge(at=time.time()),
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )
        return self.statistics.snapshot(
            time.time(), self.health(), gauge, self._fleet.condition(), held, open_orders
        )

    def periodic_tasks(self) -> tuple[PeriodicTask, ...]:
        return (
            PeriodicTask("scale", SCALE_SECONDS, self._scale),
            PeriodicTask("figures", COUNT_SECONDS, self._record_usage),
        )

    async def _scale(self) -> None:
        waiting = self._scheduler.waiting.get("slot", 0)
        self._fleet.adjust_workers(self._scheduler.running, waiting, self._governor.room)

    async def _record_usage(self) -> None:
        counts = await self._scheduler.ledger.counts()
        living = self._governor.census.usage
        self.statistics.record_usage(time.time(), counts.usage.plus(living), counts.saved)

    def _describe_state(self, condition: FleetCondition) -> str:
        if not condition.ready:
            return "broken" if self._ever_ready or condition.unfit else "starting"
        return "degraded" if condition.unfit or condition.ready < condition.wanted else "serving"

    def _explain_state(self, condition: FleetCondition) -> str:
        if condition.unfit:
            return f"a worker cannot be started: {condition.unfit}"
        if condition.ready < condition.wanted:
            return f"{condition.ready} of {condition.wanted} workers are ready"
        return ""
