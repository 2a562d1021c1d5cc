"""List and remove own build-cache records, and report a removal without effect.

`cache_ownership.py` decides which records are own, and `janitor.py` when they are removed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from ...core.image import Note
from ...docker.cache import BuildCache, CacheRecord
from .cache_ownership import SOURCE_KIND, BuildTrace, find_own_records, find_unfinished
from .locks import hold_lock

ABANDON_SECONDS = 10.0  # time in which a daemon notices that the client of a build is dead


class CachePruner:
    """Prunes one build cache. `lock` is a file that all builds of this machine share."""

    def __init__(self, records: BuildCache, lock: Path, note: Note, quiet: float) -> None:
        self._records = records
        self._lock = lock
        self._note = note
        self._quiet = quiet

    async def list_records(self) -> list[CacheRecord]:
        """Return the cache's records; wait a bounded time until no own build runs.

        A daemon that lists its records at the moment when a build becomes an image may count one reference
        to a layer too many, and then never frees the layer.
        """
        async with hold_lock(self._lock, self._quiet):
            return await self._records.records()

    async def is_idle(self) -> bool:
        """Return whether no own build runs at this moment."""
        async with hold_lock(self._lock, 0.0) as given:
            return given

    async def prune(self, traces: Sequence[BuildTrace], *, sources: bool) -> list[CacheRecord]:
        """Remove the records of builds with these traces; return the remaining records."""
        if not traces:
            return []
        records = await self.list_records()
        mine = [one for one in find_own_records(records, traces) if sources or one.kind != SOURCE_KIND]
        stuck = [one for one in mine if not await self._records.remove(one.id)]
        if not stuck:
            gone = {one.id for one in mine}
            return [one for one in records if one.id not in gone]
        records = await self.list_records()
        still = {one.id for one in find_own_records(records, traces)}.intersection(one.id for one in stuck)
        if still:
            size = sum(one.size for one in stuck if one.id in still)
            self._note(
                "cleanup.failed",
                f"build cache: {len(still)} idle records stay, {size} bytes: the prune reclaimed 0 B of them",
            )
        return records

    async def prune_all(self, traces: Sequence[BuildTrace]) -> list[BuildTrace]:
        """Remove all records of these builds, including interrupted builds that the daemon is still ending.

        Return the traces of builds with remaining records, which others need now.
        """
        broken = [trace for trace in traces if not trace.whole]
        until = time.monotonic() + ABANDON_SECONDS
        while True:
            left = await self.prune(traces, sources=True)
            going = any(one.in_use and trace.covers(one) for one in left for trace in broken)
            if not going or time.monotonic() > until:
                return find_unfinished(left, traces)
            await asyncio.sleep(0.2)  # the daemon sends no event for it
