"""Keeps a run to its budget: each second, what settled and living attempts have used, and the time so far.

What a budget is and when it is used up is in `core/budget.py`. What still runs then is interrupted, and can
be resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.budget import RunBudget
from ..core.config import RunConfig
from ..core.errors import RunStopped
from ..ledger.ledger import Ledger
from .fleet import Fleet

HINT = "`holdwater resume` with a larger budget goes on"


class BudgetWatch:
    """One conductor's eye on what a run has used, over all conductors that it had."""

    def __init__(self, config: RunConfig, ledger: Ledger) -> None:
        self._budget: RunBudget = config.budget
        self._config = config
        self._ledger = ledger
        self._clock = asyncio.get_running_loop().time
        self._began = self._clock()
        self._before = 0.0  # seconds that earlier conductors spent

    async def begin(self) -> None:
        """Raise `RunStopped` if there is work left and nothing to do it with."""
        self._before = await self._ledger.earlier_seconds()
        counts = await self._ledger.counts()
        over = self._budget.reached(counts.usage, self._seconds)
        if over is not None and counts.settled < counts.samples(self._config):
            raise RunStopped(over, HINT)

    async def look(self, fleet: Fleet, stop: Callable[[RunStopped], None]) -> None:
        """Stop the run when its budget is used up."""
        settled = (await self._ledger.counts()).usage
        # Asked in this order an attempt that settles meanwhile is missed once, never counted twice.
        over = self._budget.reached(settled.plus(fleet.census().usage), self._seconds)
        if over is not None:
            stop(RunStopped(over, HINT))

    @property
    def _seconds(self) -> float:
        return self._before + self._clock() - self._began
