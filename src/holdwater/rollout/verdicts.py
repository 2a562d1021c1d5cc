"""Makes a verdict durable before its host reports it: appends it to the worker's journal and syncs that.

`ledger/journal.py` defines the file; the fleet and `ledger/journal.py` read it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from ..core.errors import DiskFull
from ..core.records import Verdict
from ..ledger.directory import RunDirectory
from ..ledger.disk_reserve import DiskReserve
from ..ledger.journal import Journal


class VerdictJournal:
    """The journal of one host. Verdicts that arrive together share one fsync, which runs in a thread."""

    def __init__(self, directory: RunDirectory, reserve: DiskReserve, worker: int, token: int) -> None:
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
        """Return when the verdict survives a power loss. Uses up the reserve before raising `DiskFull`."""
        while True:
            try:
                self._journal.append(verdict)
                break
            except DiskFull:
                if not self._reserve.release_piece():
                    raise
        await asyncio.get_running_loop().run_in_executor(self._thread, self._journal.sync)
