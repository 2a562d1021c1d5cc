"""Reports a server's health and statistics, and passes the demand for workers to the fleet.

`stats.py` counts, `core/worker_scaling.py` decides the number of workers; this module connects both to a run.
"""

from __future__ import annotations

import time

import msgspec

from ...core.serving_protocol import ServerHealth, ServerStats
from ...core.summary import RunGauge
from ...governor.leases import AttemptLeases
from ...governor.run_usage import RunUsage
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ..conductor.scheduler import AttemptScheduler
from ..conductor.timeline import TimelineWriter
from ..fleet.interface import FleetCondition, ServingFleet
from .order_book import OrderBook

SCALE_SECONDS = 0.2
COUNT_SECONDS = 1.0


class ServerStatus:
    """The status of one server."""

    def __init__(
        self,
        ledger: Ledger,
        fleet: ServingFleet,
        book: OrderBook,
        scheduler: AttemptScheduler,
        leases: AttemptLeases,
        usage: RunUsage,
        timeline: TimelineWriter,
    ) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._book = book
        self._scheduler = scheduler
        self._leases = leases
        self._usage = usage
        self._timeline = timeline
        self._ever_ready = False  # a worker has been ready

    def health(self) -> ServerHealth:
        condition = self._fleet.condition()
        self._ever_ready = self._ever_ready or condition.ready > 0
        draining = self._book.draining or self._scheduler.draining
        waiting = self._scheduler.waiting
        return ServerHealth(
            ok=condition.ready > 0 and not draining,
            state="draining" if draining else self._describe_state(condition),
            reason="it accepts no more orders" if draining else self._explain_state(condition),
            ready=condition.ready,
            wanted=condition.wanted,
            running=self._scheduler.running,
            waiting=sum(waiting.values()),
        )

    def stats(self) -> ServerStats:
        gauge = msgspec.structs.replace(
            self._timeline.last or RunGauge(at=time.time()),
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
        )
        held, open_orders = self._book.calls.held_count, len(self._book.by_key)
        stats = self._book.statistics.snapshot(
            time.time(), self.health(), gauge, self._fleet.condition(), held, open_orders
        )
        tokens, endpoints = self._book.tokens.snapshot(), self._usage.census.endpoints
        return msgspec.structs.replace(stats, tokens=tokens, endpoints=endpoints)

    def periodic_tasks(self) -> tuple[PeriodicTask, ...]:
        return (
            PeriodicTask("scale", SCALE_SECONDS, self._scale),
            PeriodicTask("figures", COUNT_SECONDS, self._record_usage),
        )

    async def _scale(self) -> None:
        waiting = self._scheduler.waiting.get("slot", 0)
        self._fleet.adjust_workers(self._scheduler.running, waiting, self._leases.room)

    async def _record_usage(self) -> None:
        counts = await self._ledger.counts()
        living = self._usage.census.usage
        self._book.statistics.record_usage(time.time(), counts.usage.plus(living), counts.saved)

    def _describe_state(self, condition: FleetCondition) -> str:
        if not condition.ready:
            return "broken" if self._ever_ready or condition.unfit else "starting"
        return "degraded" if condition.unfit or condition.ready < condition.wanted else "serving"

    def _explain_state(self, condition: FleetCondition) -> str:
        if self._scheduler.clock.paused:
            return "the run is paused"
        if condition.unfit:
            return f"a worker cannot be started: {condition.unfit}"
        if condition.ready < condition.wanted:
            return f"{condition.ready} of {condition.wanted} workers are ready"
        return ""
