"""Makes a verdict last before its host reports it: in the worker's journal, and synced in a thread.

The journal's file is `ledger/journal.py`; the fleet and `ledger/recovery.py` read it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from ..core.errors import DiskFull
from ..core.records import Verdict
from ..ledger.directory import RunDirectory
from ..ledger.journal import Journal
from ..ledger.reserve import Reserve


class VerdictJournal:
    """The journal of one host. Verdicts that come together share one fsync."""

    def __init__(self, directory: RunDirectory, reserve: Reserve, worker: int, token: int) -> None:
        self._journal = Journal(directory, worker, token)
        self._reserve = reserve
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdwater-journal")

    def __enter__(self) -> VerdictJournal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False)
        self._journal.close()

    async def write(self, verdict: Verdict) -> None:
        """Return when the verdict survives power loss; the reserve is used up before `DiskFull` is raised."""
        while True:
            try:
                self._journal.append(verdict)
                break
            except DiskFull:
                if not self._reserve.give():
                    raise
        await asyncio.get_running_loop().run_in_executor(self._thread, self._journal.sync)
