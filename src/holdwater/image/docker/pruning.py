"""Lists and removes build-cache records of ours, and notices when that has no effect.

Which they are is decided in `traces.py`, and when they go in `janitor.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from ...core.image import Note
from ...docker.cache import BuildCache, CacheRecord
from .locks import held
from .traces import SOURCE, Trace, ours, unfinished

LETTING_GO = 10.0  # seconds in which a daemon notices that whoever asked for a build is dead


class Pruner:
    """One build cache. `lock` is a file that all builds of this machine share."""

    def __init__(self, records: BuildCache, lock: Path, note: Note, quiet: float) -> None:
        self._records = records
        self._lock = lock
        self._note = note
        self._quiet = quiet

    async def listed(self) -> list[CacheRecord]:
        """The cache's records, while no build of ours goes on, if that can be had.

        A daemon that is asked for them at the moment when a build turns into an image may count a layer once
        too often, and then never lets go of it.
        """
        async with held(self._lock, self._quiet):
            return await self._records.records()

    async def idle(self) -> bool:
        """Whether no build of ours goes on at this moment."""
        async with held(self._lock, 0.0) as given:
            return given

    async def prune(self, traces: Sequence[Trace], *, sources: bool) -> list[CacheRecord]:
        """Remove the records of builds with these traces; what the cache has afterwards."""
        if not traces:
            return []
        records = await self.listed()
        mine = [one for one in ours(records, traces) if sources or one.kind != SOURCE]
        stuck = [one for one in mine if not await self._records.remove(one.id)]
        if not stuck:
            gone = {one.id for one in mine}
            return [one for one in records if one.id not in gone]
        records = await self.listed()
        still = {one.id for one in ours(records, traces)}.intersection(one.id for one in stuck)
        if still:
            size = sum(one.size for one in stuck if one.id in still)
            self._note(
                "cleanup.failed",
                f"build cache: {len(still)} idle records stay, {size} bytes: the prune reclaimed 0 B of them",
            )
        return records

    async def prune_to_the_end(self, traces: Sequence[Trace]) -> list[Trace]:
        """All records, those of builds too that were broken off and that the daemon is about to end.

        The traces are given back of which something is left that others need now.
        """
        broken = [trace for trace in traces if not trace.whole]
        until = time.monotonic() + LETTING_GO
        while True:
            left = await self.prune(traces, sources=True)
            going = any(one.in_use and trace.covers(one) for one in left for trace in broken)
            if not going or time.monotonic() > until:
                return unfinished(left, traces)
            await asyncio.sleep(0.2)  # no event tells of it
