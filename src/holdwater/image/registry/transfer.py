"""Transfer blobs to a repository: skip present blobs, mount others, upload the rest, each blob only once.

A bounded cache remembers the locations of blobs. `engine.py` decides which blobs an image needs.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from weakref import WeakValueDictionary

from ...core.image import Note
from .client import MountResult, RegistryClients
from .manifest import BlobDescriptor
from .reference import ImageReference
from .refusal import RegistryRefusal

MOST_CONCURRENT = 32  # blobs in transfer
MOST_BLOBS = 4096  # blobs with known locations
MOST_PLACES = 64  # known repositories of one blob
MOST_COUNTED = 16384

BlobSource = Path | ImageReference  # a file, or a repository that has the blob


class TransferTotals:
    """The transfers of one image."""

    def __init__(self) -> None:
        self.uploaded = 0  # bytes
        self.downloaded = 0
        self.mounted = 0  # blobs


class BlobTransfers:
    """The transfers of an engine. Create it in a running event loop."""

    def __init__(self, registries: RegistryClients, note: Note) -> None:
        self._registries = registries
        self._note = note
        self._known = BlobLocations()
        self._counted: OrderedDict[Hashable, None] = OrderedDict()  # bound: MOST_COUNTED, the latest
        self._refusing: set[str] = set()  # registries that refused a mount; bound: the recipe's
        # one lock for each blob in transfer: the next holder sees the result of the one before
        self._locks: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._slots = asyncio.Semaphore(MOST_CONCURRENT)

    async def bring(
        self, blob: BlobDescriptor, target: ImageReference, source: BlobSource, account: TransferTotals
    ) -> None:
        """Make sure that the repository `target` has the blob."""
        if self._known.has(target, blob.digest):
            return
        async with self._locks.setdefault((target, blob.digest), asyncio.Lock()):
            if not self._known.has(target, blob.digest):
                async with self._slots:
                    await self._transfer(blob, target, source, account)
                self._known.add(target, blob.digest)

    async def foresee(self, blob: BlobDescriptor, target: ImageReference, source: BlobSource) -> int:
        """Return an estimate of the bytes that `bring` would send; a blob counts only the first time."""
        mountable = self._find_origin(blob.digest, target, source) and target.registry not in self._refusing
        if mountable or self._known.has(target, blob.digest):
            return 0
        async with self._locks.setdefault((target, blob.digest), asyncio.Lock()):
            if (target, blob.digest) in self._counted:
                return 0
            async with self._slots:
                there = await self._registries.client_for(target.registry).has(target.repository, blob.digest)
            if there:
                self._known.add(target, blob.digest)
                return 0
            self._counted[target, blob.digest] = None
            if len(self._counted) > MOST_COUNTED:
                self._counted.popitem(last=False)
            return blob.size

    def forget(self, target: ImageReference, digests: set[str]) -> None:
        """Forget the locations of these blobs, after the registry reported some as missing."""
        for digest in digests:
            self._known.drop(target, digest)

    async def _transfer(
        self, blob: BlobDescriptor, target: ImageReference, source: BlobSource, account: TransferTotals
    ) -> None:
        client = self._registries.client_for(target.registry)
        origin = self._find_origin(blob.digest, target, source)
        mount = await client.mount(target.repository, blob.digest, origin) if origin else MountResult(False)
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
            other, where = self._registries.client_for(source.registry), source.repository
            await client.upload_stream(
                target.repository,
                blob.digest,
                blob.size,
                lambda: other.open_blob(where, blob.digest, blob.size),
                mount.location,
            )
            account.downloaded += blob.size
        account.uploaded += blob.size

    def _find_origin(self, digest: str, target: ImageReference, source: BlobSource) -> str:
        """Return another repository of the same registry that has the blob; empty: none is known."""
        if isinstance(source, ImageReference) and source.registry == target.registry:
            return source.repository
        return self._known.find_other(target, digest)

    async def _cancel(self, target: ImageReference, location: str) -> None:
        if not location:
            return
        try:
            await self._registries.client_for(target.registry).cancel(target.repository, location)
        except RegistryRefusal as error:
            self._note("cleanup.failed", error.message)


class BlobLocations:
    """Known repositories of blobs, limited to the most recently used."""

    def __init__(self) -> None:
        # bound: MOST_BLOBS by MOST_PLACES, the most recently used of each
        self._places: OrderedDict[tuple[str, str], OrderedDict[str, None]] = OrderedDict()

    def has(self, where: ImageReference, digest: str) -> bool:
        places = self._places.get((where.registry, digest))
        if places is None or where.repository not in places:
            return False
        self._places.move_to_end((where.registry, digest))
        places.move_to_end(where.repository)
        return True

    def find_other(self, where: ImageReference, digest: str) -> str:
        """Return the most recently used other repository of the same registry that has the blob."""
        places = self._places.get((where.registry, digest), OrderedDict())
        return next((place for place in reversed(places) if place != where.repository), "")

    def add(self, where: ImageReference, digest: str) -> None:
        key = where.registry, digest
        places = self._places.setdefault(key, OrderedDict())
        self._places.move_to_end(key)
        places[where.repository] = None
        if len(places) > MOST_PLACES:
            places.popitem(last=False)
        if len(self._places) > MOST_BLOBS:
            self._places.popitem(last=False)

    def drop(self, where: ImageReference, digest: str) -> None:
        places = self._places.get((where.registry, digest))
        if places is not None:
            places.pop(where.repository, None)
