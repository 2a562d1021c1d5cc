"""The janitor of a run with sandboxes: images stay while they are held, and are evicted when space is needed.

Each image of the run has a tag of the run beside its original name. The tag protects the image from the
janitors of other runs, and identifies the leftovers of a dead run. `image_store.py` pulls and builds.
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
from .base_retention import OwnedBase
from .daemon_images import has_image
from .janitor import Janitor
from .journal import SUFFIX, BasePulled, DiskBaseline, slug


class ImageKeeper(Janitor):
    """A janitor that evicts the least recently used image first, and adopts an earlier conductor's images."""

    def __init__(self, client: DockerClient, state: Path, run: str, cache: int, note: Note) -> None:
        super().__init__(client, state, run, cache, note)
        self._spared.add(slug(run) + SUFFIX)  # a resumed run continues its own journal
        self._removal_lock = asyncio.Lock()  # no tag is set on an image during its removal
        # names of images that attempts will need soon: evicted last
        self.wanted_soon: Callable[[], Collection[str]] = lambda: ()

    def record_disk_use(self, used: int) -> int:
        """Return the used bytes that do not belong to this run; a resumed run already has images there."""
        if self._contents.disk_used is None:
            self._open_journal.write(DiskBaseline(used))
            return used
        mine = sum(base.size for base in self._contents.bases.values())
        return used - min(mine, max(0, used - self._contents.disk_used))

    @contextmanager
    def hold_images(self, *names: str) -> Iterator[None]:
        """Protect the images with these names from eviction; they need not exist yet."""
        self._busy.update(names)
        try:
            yield
        finally:
            self._busy -= Counter(names)
            for name in names:
                if (base := self._contents.bases.get(name)) is not None:
                    self._contents.bases[name] = replace(base, used=time.time())

    async def try_tag(self, source: str, tag: str) -> bool:
        """Give the image `source` this tag of the run; return whether the image exists."""
        async with self._removal_lock:
            self.claim_name(tag)
            name, _, word = tag.rpartition(":")
            try:
                await self._client.post(f"/images/{source}/tag", {"repo": name, "tag": word})
            except DockerError as error:
                if error.status != 404:
                    raise
                return await has_image(self._client, tag)
        return True

    def claim_name(self, name: str) -> None:
        """Record an image name as owned; the name must be absent from the daemon, or be a tag of the run."""
        if name not in self._contents.bases:
            self._open_journal.write(BasePulled(OwnedBase(reference=name, used=time.time())))

    def record_pulled(self, reference: str, size: int) -> None:
        """Record the size of a pulled or built image, which may stay after the run."""
        if (base := self._contents.bases.get(reference)) is not None:
            self._open_journal.write(BasePulled(replace(base, size=size, used=time.time(), warm=True)))

    async def settle(self, tags: Sequence[str] = ()) -> None:
        """Clean up after an image of the plan; bases stay until space is needed."""
        await self.untag(tags)
        await self.reset()

    async def make_room(self, wanted: int) -> int:
        await self.evict(lambda: (self.free_bytes() or wanted) >= wanted)
        return self.free_bytes() or 0

    async def evict(self, enough: Callable[[], bool]) -> None:
        """Remove idle images of the run, least recently used first, until `enough` returns true."""
        if not enough():
            await self._run_locked("images", partial(self._evict, enough))

    async def _evict(self, enough: Callable[[], bool]) -> None:
        soon, bases = self.wanted_soon(), self._contents.bases
        for name in sorted(bases, key=lambda one: (one in soon, bases[one].used, one)):
            if enough():
                return
            async with self._removal_lock:
                if not self._busy[name]:
                    await self._remove(name)
        await self._drop_names()
        await self._trim(sources=True)
