"""Adds up the workers' reports on the servers of the model, and keeps the total of the run in the ledger.

A worker reports the calls since its last report; the state of a server is the worst that a worker sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ...core.endpoints import EndpointUse, EndpointUses, find_worst, sum_uses
from ...governor.resource_reading import FleetCensus
from ...ledger.ledger import Ledger
from ...ledger.record_encoding import encode_record
from ...rollout.periodic_task import PeriodicTask

SECONDS = 1.0


class EndpointTally:
    """The reports of one fleet."""

    def __init__(self) -> None:
        self._totals: dict[str, EndpointUse] = {}  # by URL; bound: `MOST_ENDPOINTS`
        self._last: dict[int, tuple[EndpointUse, ...]] = {}  # by worker; bound: the open workers

    def add(self, worker: int, uses: tuple[EndpointUse, ...]) -> None:
        """Add a worker's report."""
        self._last[worker] = uses
        for use in uses:
            self._totals[use.url] = sum_uses(self._totals.get(use.url, EndpointUse(url=use.url)), use)

    def forget(self, worker: int) -> None:
        """Forget the states that a worker saw; its calls stay counted."""
        self._last.pop(worker, None)

    def sum_up(self) -> tuple[EndpointUse, ...]:
        """Return the calls of each server, in their order, with its worst state."""
        seen = [use for uses in self._last.values() for use in uses]
        return tuple(self._judge(total, seen) for total in self._totals.values())

    def _judge(self, total: EndpointUse, seen: Iterable[EndpointUse]) -> EndpointUse:
        fitting = [use for use in seen if use.url == total.url]
        worst = find_worst(fitting) if fitting else EndpointUse(url=total.url)
        return msgspec.structs.replace(total, state=worst.state, error=worst.error)


class EndpointTotals:
    """The calls of each server over all conductors of a run."""

    def __init__(self, ledger: Ledger, take_census: Callable[[], FleetCensus]) -> None:
        self._ledger = ledger
        self._before: dict[str, EndpointUse] | None = None  # of earlier conductors, when the first is written
        self._take_census = take_census
        self._written: tuple[EndpointUse, ...] = ()

    def periodic_task(self) -> PeriodicTask:
        return PeriodicTask("endpoints", SECONDS, self.write)

    async def write(self) -> None:
        """Write the totals if they have changed."""
        uses = self._take_census().endpoints
        if uses == self._written:
            return
        if self._before is None:
            kept = await self._ledger.recall("endpoints")
            uses_before = msgspec.msgpack.decode(kept, type=EndpointUses).uses if kept is not None else ()
            self._before = {use.url: use for use in uses_before}
        self._written = uses
        totals = [sum_uses(self._before.get(use.url, EndpointUse(url=use.url)), use) for use in uses]
        await self._ledger.remember("endpoints", encode_record(EndpointUses(uses=tuple(totals))))
