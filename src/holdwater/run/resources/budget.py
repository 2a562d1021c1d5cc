"""Stops a run whose budget is used up: checks each second the usage of all attempts and the elapsed time.

`core/prices.py` defines budgets. Attempts that still run are interrupted, and the run can be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...core.config import RunConfig
from ...core.errors import RunStopped
from ...core.prices import RunBudget
from ...ledger.ledger import Ledger
from ..fleet.interface import Fleet

HINT = "continue with `holdwater resume` and a larger budget"


class BudgetWatch:
    """Watches the use of a run's budget over all conductors that the run had."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._budget: RunBudget = config.budget
        self._config = config
        self._ledger = ledger
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._before = 0.0  # seconds that earlier conductors spent

    async def begin(self) -> None:
        """Raise `RunStopped` if work is left and the budget is used up."""
        self._before = await self._ledger.earlier_seconds()
        counts = await self._ledger.counts()
        over = self._budget.find_used_up(counts.usage, self._seconds)
        if over is not None and counts.settled < counts.samples(self._config):
            raise RunStopped(over, HINT)

    async def look(self, fleet: Fleet, stop: Callable[[RunStopped], None]) -> None:
        """Stop the run when its budget is used up."""
        settled = (await self._ledger.counts()).usage
        # In this order, an attempt that settles meanwhile is missed once, but never counted twice.
        over = self._budget.find_used_up(settled.plus(fleet.take_census().usage), self._seconds)
        if over is not None:
            stop(RunStopped(over, HINT))

    @property
    def _seconds(self) -> float:
        return self._before + self._clock() - self._began
