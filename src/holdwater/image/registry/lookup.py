"""What the docker engine asks of registries: what a base weighs, what a tag holds, who we are there.

What a layer takes unpacked is read from the last bytes of its blob, without fetching the rest.
"""

from __future__ import annotations

import base64
from collections import OrderedDict

import msgspec

from ...core.errors import AttemptError
from ...core.image import KEY_LABEL, Platform
from ..docker.bases import Base, BaseLayer
from .base import Base as Resolved
from .base import resolve
from .client import Registries, RegistryClient
from .credentials import Credentials
from .manifest import LARGEST_CONFIG, Blob, Manifest, Written, read
from .reference import parse
from .refusal import Refusal
from .together import together

KNOWN = 4096  # bases that are remembered: a plan, its attempts and their retries ask for the same
RATIO = 3.0  # of unpacked to compressed, where a blob does not tell
LEAST_RATIO = 0.9  # a gzip below this counts modulo 4 GiB, or in several members


class _RootFS(msgspec.Struct, frozen=True):
    diff_ids: list[str] = []


class _Settings(msgspec.Struct, frozen=True):
    Labels: dict[str, str] | None = None


class _Config(msgspec.Struct, frozen=True):
    """The part of an image's configuration that is looked at."""

    rootfs: _RootFS = _RootFS()
    config: _Settings | None = None


class RegistryBases:
    """Asks registries: a `bases.Bases`."""

    def __init__(self, registries: Registries, credentials: Credentials) -> None:
        self._registries = registries
        self._credentials = credentials
        self._known: OrderedDict[tuple[str, Platform], Base] = OrderedDict()  # bound: KNOWN

    async def base(self, reference: str, platform: Platform) -> Base:
        key = reference, platform
        if key not in self._known:
            self._known[key] = await self._asked(reference, platform)
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    async def found(self, reference: str) -> tuple[str, str] | None:
        place = parse(reference)
        client = self._registries.registry(place.registry)
        try:
            found = await client.manifest(place.repository, place.target)
        except Refusal as error:
            if error.kind == "missing":
                return None
            raise
        manifest = read(reference, found.content, found.media_type)
        if not isinstance(manifest, Manifest):
            return found.digest, ""
        settings = (await self._config(client, place.repository, manifest)).config or _Settings()
        return found.digest, (settings.Labels or {}).get(KEY_LABEL, "")

    async def alias(self, reference: str, tag: str) -> None:
        place = parse(reference)
        client = self._registries.registry(place.registry)
        found = await client.manifest(place.repository, place.target)
        await client.put_manifest(
            place.repository, tag, Written(found.content, found.media_type, found.digest)
        )

    async def auth(self, host: str) -> str:
        login = await self._credentials.login(host)
        if login is None:
            return ""
        told = {"username": login.username, "password": login.password, "serveraddress": host}
        if login.identity:
            told = {"identitytoken": login.identity, "serveraddress": host}
        return base64.urlsafe_b64encode(msgspec.json.encode(told)).decode()

    async def _asked(self, reference: str, platform: Platform) -> Base:
        place = parse(reference)
        client = self._registries.registry(place.registry)
        resolved: Resolved = await resolve(client, place, (platform,))
        manifest = resolved.images[0]
        config = await self._config(client, place.repository, manifest)
        sizes = await together(*(self._unpacked(client, place.repository, one) for one in manifest.layers))
        layers = tuple(
            BaseLayer(digest=blob.digest, size=blob.size, diff_id=diff_id)
            for blob, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=False)
        )
        return Base(digest=resolved.digest, config=manifest.config.digest, layers=layers, unpacked=sum(sizes))

    async def _config(self, client: RegistryClient, repository: str, manifest: Manifest) -> _Config:
        blob = manifest.config
        content = await client.small(repository, blob.digest, blob.size, LARGEST_CONFIG)
        return msgspec.json.decode(content, type=_Config)

    async def _unpacked(self, client: RegistryClient, repository: str, blob: Blob) -> int:
        """A gzip ends with the size of what is in it."""
        try:
            tail = await client.tail(repository, blob.digest, blob.size, 4)
        except AttemptError:
            return int(blob.size * RATIO)  # an estimate is no reason to fail
        told = int.from_bytes(tail, "little")
        return told if len(tail) == 4 and told > blob.size * LEAST_RATIO else int(blob.size * RATIO)
