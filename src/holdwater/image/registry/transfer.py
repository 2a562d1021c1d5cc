"""Blobs brought to where they are needed: not at all, by a mount, or sent; each once, whoever asks for it.

What is known to be where is remembered within a bound. Which blobs an image needs is in `append.py`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from pathlib import Path

from ...core.image import Note
from .client import Registries
from .manifest import Blob
from .reference import Reference
from .refusal import Refusal
from .upload import Mount

AT_ONCE = 32  # blobs on their way
MOST_BLOBS = 4096  # that are known to be in a registry
MOST_PLACES = 64  # repositories that one is known to be in
MOST_COUNTED = 16384

Source = Path | Reference  # a file, or a repository that has the blob


class Account:
    """What one image cost."""

    def __init__(self) -> None:
        self.uploaded = 0  # bytes
        self.downloaded = 0
        self.mounted = 0  # blobs


class Transfers:
    """Made in a running loop."""

    def __init__(self, registries: Registries, note: Note) -> None:
        self._registries = registries
        self._note = note
        self._known = Known()
        self._counted: OrderedDict[Hashable, None] = OrderedDict()  # bound: MOST_COUNTED, the latest
        self._refusing: set[str] = set()  # registries that refused a mount; bound: those that a recipe names
        self._flights = Flights()
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def bring(self, blob: Blob, target: Reference, source: Source, account: Account) -> None:
        """Have a blob in the repository `target`."""
        if self._known.has(target, blob.digest):
            return
        async with self._flights.alone((target, blob.digest)):
            if not self._known.has(target, blob.digest):
                async with self._slots:
                    await self._brought(blob, target, source, account)
                self._known.add(target, blob.digest)

    async def foresee(self, blob: Blob, target: Reference, source: Source) -> int:
        """Bytes that `bring` would send, as far as can be told; those of a blob are told once."""
        mountable = self._origin(blob.digest, target, source) and target.registry not in self._refusing
        if mountable or self._known.has(target, blob.digest):
            return 0
        async with self._flights.alone((target, blob.digest)):
            if (target, blob.digest) in self._counted:
                return 0
            async with self._slots:
                there = await self._registries.registry(target.registry).has(target.repository, blob.digest)
            if there:
                self._known.add(target, blob.digest)
                return 0
            self._counted[target, blob.digest] = None
            if len(self._counted) > MOST_COUNTED:
                self._counted.popitem(last=False)
            return blob.size

    def forget(self, target: Reference, digests: set[str]) -> None:
        """The registry says that it has not all of these."""
        for digest in digests:
            self._known.drop(target, digest)

    async def _brought(self, blob: Blob, target: Reference, source: Source, account: Account) -> None:
        client = self._registries.registry(target.registry)
        origin = self._origin(blob.digest, target, source)
        mount = await client.mount(target.repository, blob.digest, origin) if origin else Mount(False)
        if mount.done:
            account.mounted += 1
            return
        if origin:
            self._refusing.add(target.registry)
        if await client.has(target.repository, blob.digest):
            await self._cancel(target, mount.location)
            return
        if isinstance(source, Path):
            await client.upload_file(target.repository, blob.digest, blob.size, source, mount.location)
        else:
            other, where = self._registries.registry(source.registry), source.repository
            await client.upload_stream(
                target.repository,
                blob.digest,
                blob.size,
                lambda: other.blob(where, blob.digest, blob.size),
                mount.location,
            )
            account.downloaded += blob.size
        account.uploaded += blob.size

    def _origin(self, digest: str, target: Reference, source: Source) -> str:
        """Another repository of the same registry that has the blob; empty: none is known."""
        if isinstance(source, Reference) and source.registry == target.registry:
            return source.repository
        return self._known.elsewhere(target, digest)

    async def _cancel(self, target: Reference, location: str) -> None:
        if not location:
            return
        try:
            await self._registries.registry(target.registry).cancel(target.repository, location)
        except Refusal as error:
            self._note("cleanup.failed", error.message)


class Known:
    """Which repositories have which blobs, for the blobs and places that were used last."""

    def __init__(self) -> None:
        # bound: MOST_BLOBS by MOST_PLACES, the latest used of each
        self._places: OrderedDict[tuple[str, str], OrderedDict[str, None]] = OrderedDict()

    def has(self, where: Reference, digest: str) -> bool:
        places = self._places.get((where.registry, digest))
        if places is None or where.repository not in places:
            return False
        self._places.move_to_end((where.registry, digest))
        places.move_to_end(where.repository)
        return True

    def elsewhere(self, where: Reference, digest: str) -> str:
        """The repository of the same registry that was last known to have it."""
        places = self._places.get((where.registry, digest), OrderedDict())
        return next((place for place in reversed(places) if place != where.repository), "")

    def add(self, where: Reference, digest: str) -> None:
        key = where.registry, digest
        places = self._places.setdefault(key, OrderedDict())
        self._places.move_to_end(key)
        places[where.repository] = None
        if len(places) > MOST_PLACES:
            places.popitem(last=False)
        if len(self._places) > MOST_BLOBS:
            self._places.popitem(last=False)

    def drop(self, where: Reference, digest: str) -> None:
        places = self._places.get((where.registry, digest))
        if places is not None:
            places.pop(where.repository, None)


class Flights:
    """One at a time for each key; the next in line sees what the one before has done."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}  # bound: those who are in line now

    @asynccontextmanager
    async def alone(self, key: Hashable) -> AsyncIterator[None]:
        lock, line = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, line + 1
        try:
            async with lock:
                yield
        finally:
            lock, line = self._locks[key]
            if line > 1:
                self._locks[key] = lock, line - 1
            else:
                del self._locks[key]
