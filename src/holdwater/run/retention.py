"""Removes the files of closed samples that a run does not keep, a page at a time and off the busy path.

Which they are is committed with each outcome, see `ledger/retention.py`; here they only go. What a kill or a
disk that fails leaves over is found by the next conductor, or by `holdwater prune`.
"""

from __future__ import annotations

import asyncio

from ..core.config import Keep, RunConfig
from ..ledger.directory import RunDirectory
from ..ledger.ledger import Ledger
from ..ledger.retention import Removed, remove_files
from ..rollout.calls import Calls
from ..rollout.duty import Duty

EVERY = 1.0  # seconds
LONGEST = 300.0  # for one turn: an earlier conductor may have left much
PAGE = 64  # attempts whose files go at once
MOST_FAILED = 64  # attempts; if the files of more cannot be removed, this conductor stops trying
LAST_SECONDS = 30.0  # for what is left at the end of the run


class Retention:
    """One conductor's. A failure is an event and changes no verdict."""

    def __init__(self, config: RunConfig, directory: RunDirectory, ledger: Ledger) -> None:
        self._directory = directory
        self._ledger = ledger
        self._calls = Calls("retention")
        self._failed: set[int] = set()  # bound: MOST_FAILED + PAGE
        self._page: asyncio.Task[bool] | None = None
        self.duties = () if config.keep is Keep.ALL else (Duty("retention", EVERY, self.tidy, LONGEST),)

    async def tidy(self) -> None:
        """Remove what is to go. One page is under way at a time: a disk that hangs keeps one thread."""
        while await asyncio.shield(self._started()):
            pass

    async def finish(self) -> None:
        """The run is over: remove the rest, for a while."""
        if not self.duties:
            return
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self.tidy()
        except TimeoutError:
            await self._ledger.note("retention.failed", f"not done {LAST_SECONDS:g} s after the end")

    async def close(self) -> None:
        """Leave what is not done to the next conductor."""
        if self._page is None:
            return
        self._page.cancel()
        await asyncio.wait({self._page})
        if not self._page.cancelled():
            self._page.exception()  # seen: what is wrong with the ledger is told by those who need it

    def _started(self) -> asyncio.Task[bool]:
        if self._page is None or self._page.done():
            self._page = asyncio.ensure_future(self._remove_page())
        return self._page

    async def _remove_page(self) -> bool:
        """Whether there may be more."""
        if len(self._failed) >= MOST_FAILED:
            return False
        found = await self._ledger.going(PAGE + len(self._failed))
        page = [(attempt, name) for attempt, name in found if attempt not in self._failed]
        if not page:
            return False
        removed: Removed = await self._calls.call(remove_files, self._directory, page)
        await self._ledger.gone(removed.freed)
        for attempt, why in removed.failed.items():
            self._failed.add(attempt)
            await self._ledger.note("retention.failed", why, attempt)
        return True
