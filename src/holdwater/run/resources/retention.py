"""Removes the files of closed samples that a run does not keep, a page at a time and off the busy path.

Each outcome commits which files go (`ledger/attempt_files.py`); this module only removes them. Files left by
a kill or a failing disk are removed by the next conductor, or by `holdwater prune`.
"""

from __future__ import annotations

import asyncio

from ...core.config import KeepRule, RunConfig
from ...ledger.attempt_files import RemovalResult, remove_files
from ...ledger.directory import RunDirectory
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ...rollout.user_calls import UserCalls

EVERY = 1.0  # seconds
LONGEST = 300.0  # for one turn: an earlier conductor may have left many files
PAGE = 64  # attempts whose files are removed at once
MOST_FAILED = 64  # attempts; if the files of more cannot be removed, this conductor stops trying
LAST_SECONDS = 30.0  # for the remaining files at the end of the run


class FileRetention:
    """Removes the files for one conductor. A failure is an event and changes no verdict."""

    def __init__(self, config: RunConfig, directory: RunDirectory, ledger: Ledger) -> None:
        self._directory = directory
        self._ledger = ledger
        self._calls = UserCalls("retention")
        self._failed: set[int] = set()  # bound: MOST_FAILED + PAGE
        self._page: asyncio.Task[bool] | None = None
        self.periodic_tasks = (
            () if config.keep is KeepRule.ALL else (PeriodicTask("retention", EVERY, self.tidy, LONGEST),)
        )

    async def tidy(self) -> None:
        """Remove all pending files, one page at a time, so that a hung disk blocks only one thread."""
        while await asyncio.shield(self._start_page()):
            pass

    async def finish(self) -> None:
        """Remove the remaining files at the end of the run, within `LAST_SECONDS`."""
        if not self.periodic_tasks:
            return
        try:
            async with asyncio.timeout(LAST_SECONDS):
                await self.tidy()
        except TimeoutError:
            await self._ledger.note("retention.failed", f"not done {LAST_SECONDS:g} s after the end")

    async def close(self) -> None:
        """Leave unfinished removals to the next conductor."""
        if self._page is None:
            return
        self._page.cancel()
        await asyncio.wait({self._page})
        if not self._page.cancelled():
            self._page.exception()  # retrieved: a failing ledger is reported by its other users

    def _start_page(self) -> asyncio.Task[bool]:
        if self._page is None or self._page.done():
            self._page = asyncio.ensure_future(self._remove_page())
        return self._page

    async def _remove_page(self) -> bool:
        """Remove one page of files; return whether there may be more."""
        if len(self._failed) >= MOST_FAILED:
            return False
        found = await self._ledger.pending_deletions(PAGE + len(self._failed))
        page = [(attempt, name) for attempt, name in found if attempt not in self._failed]
        if not page:
            return False
        removed: RemovalResult = await self._calls.call(remove_files, self._directory, page)
        await self._ledger.record_deleted(removed.freed)
        for attempt, why in removed.failed.items():
            self._failed.add(attempt)
            await self._ledger.note("retention.failed", why, attempt)
        return True
