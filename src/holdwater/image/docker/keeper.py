"""The janitor of a run: what its sandboxes start from stays while it is held, and goes when room is wanted.

An image of ours has a tag of the run's own beside the name that it came by: so no other run takes it away,
and what a dead run left is found by its name. Who pulls and builds is in `stock.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ...core.image import Note
from ...docker.client import DockerClient, DockerError
from .janitor import Janitor
from .journal import SUFFIX, Found, Pulled, slug
from .warmth import Holding


class Keeper(Janitor):
    """A janitor who evicts the least recently used first, and adopts what an earlier conductor left."""

    def __init__(self, client: DockerClient, state: Path, run: str, cache: int, note: Note) -> None:
        super().__init__(client, state, run, cache, note)
        self._spared.add(slug(run) + SUFFIX)  # a resumed run goes on with its own journal
        self._turn = asyncio.Lock()  # an image that is being removed is not found meanwhile
        self.soon: Callable[[], Collection[str]] = lambda: ()  # names that will be wanted: the last to go

    def began(self, used: int) -> int:
        """Bytes of those used on the disk that are not this run's: a resumed one has images there."""
        if self._told.found is None:
            self._open.write(Found(used))
            return used
        mine = sum(base.size for base in self._told.bases.values())
        return used - min(mine, max(0, used - self._told.found))

    @contextmanager
    def holding(self, *names: str) -> Iterator[None]:
        """Nobody evicts what has these names meanwhile, whether it is there already or not."""
        self._busy.update(names)
        try:
            yield
        finally:
            self._busy -= Counter(names)
            for name in names:
                if (base := self._told.bases.get(name)) is not None:
                    self._told.bases[name] = replace(base, used=time.time())

    async def tagged(self, source: str, tag: str) -> bool:
        """Whether what has the name `source` is there, and has this tag of the run's own from now on."""
        async with self._turn:
            self.own(tag)
            name, _, word = tag.rpartition(":")
            try:
                await self._client.post(f"/images/{source}/tag", {"repo": name, "tag": word})
            except DockerError as error:
                if error.status != 404:
                    raise
                return await self._client.found(f"/images/{tag}/json") is not None
        return True

    def own(self, name: str) -> None:
        """It is not there, or is a tag of the run's own: what has this name from now on is ours."""
        if name not in self._told.bases:
            self._open.write(Pulled(Holding(reference=name, used=time.time())))

    def pulled(self, reference: str, size: int) -> None:
        """It is there, and may stay after the run."""
        if (base := self._told.bases.get(reference)) is not None:
            self._open.write(Pulled(replace(base, size=size, used=time.time(), warm=True)))

    async def settle(self, tags: Sequence[str] = ()) -> None:
        """An image of the plan is done; bases go when room is wanted."""
        await self.untag(tags)
        await self.reset()

    async def make_room(self, wanted: int) -> int:
        await self.evict(lambda: (self.free() or wanted) >= wanted)
        return self.free() or 0

    async def evict(self, enough: Callable[[], bool]) -> None:
        """Remove what is ours and idle until that is enough."""
        if not enough():
            await self._tried("images", partial(self._evict, enough))

    async def _evict(self, enough: Callable[[], bool]) -> None:
        soon, bases = self.soon(), self._told.bases
        for name in sorted(bases, key=lambda one: (one in soon, bases[one].used, one)):
            if enough():
                return
            async with self._turn:
                if not self._busy[name]:
                    await self._remove(name)
        await self._drop_names()
        await self._trim(sources=True)
