"""Registry lookups for the docker engine: sizes of bases, contents of tags, logins.

A layer's unpacked size comes from the last bytes of its blob, without a download of the rest.
"""

from __future__ import annotations

import base64
from collections import OrderedDict

import msgspec

from ...core.errors import AttemptError
from ...core.image import KEY_LABEL, ImagePlatform
from ..docker.bases import BaseImage, BaseLayer
from .base import ResolvedBase as Resolved
from .base import resolve_base
from .client import RegistryClient, RegistryClients
from .concurrency import run_concurrently
from .credentials import RegistryCredentials
from .manifest import LARGEST_CONFIG, BlobDescriptor, EncodedManifest, ImageManifest, parse_manifest
from .reference import parse_reference
from .refusal import RegistryRefusal

MOST_BASES = 4096  # cached bases: a plan, its attempts and their retries look up the same bases
UNPACKED_RATIO = 3.0  # of unpacked to compressed, if the blob does not show it
LEAST_RATIO = 0.9  # a gzip size below this is modulo 4 GiB, or of the last of several members


class _ImageRootFS(msgspec.Struct, frozen=True):
    diff_ids: list[str] = []


class _ImageSettings(msgspec.Struct, frozen=True):
    Labels: dict[str, str] | None = None


class _ImageConfig(msgspec.Struct, frozen=True):
    """The part of an image's configuration that lookups read."""

    rootfs: _ImageRootFS = _ImageRootFS()
    config: _ImageSettings | None = None


class RegistryLookup:
    """Implements `docker.bases.BaseLookup` with registry clients."""

    def __init__(self, registries: RegistryClients, credentials: RegistryCredentials) -> None:
        self._registries = registries
        self._credentials = credentials
        self._known: OrderedDict[tuple[str, ImagePlatform], BaseImage] = OrderedDict()  # bound: MOST_BASES

    async def find_base(self, reference: str, platform: ImagePlatform) -> BaseImage:
        key = reference, platform
        if key not in self._known:
            self._known[key] = await self._read_base(reference, platform)
            if len(self._known) > MOST_BASES:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return self._known[key]

    async def find_tag(self, reference: str) -> tuple[str, str] | None:
        place = parse_reference(reference)
        client = self._registries.client_for(place.registry)
        try:
            found = await client.read_manifest(place.repository, place.target)
        except RegistryRefusal as error:
            if error.kind == "missing":
                return None
            raise
        manifest = parse_manifest(reference, found.content, found.media_type)
        if not isinstance(manifest, ImageManifest):
            return found.digest, ""
        settings = (await self._read_config(client, place.repository, manifest)).config or _ImageSettings()
        return found.digest, (settings.Labels or {}).get(KEY_LABEL, "")

    async def alias(self, reference: str, tag: str) -> None:
        place = parse_reference(reference)
        client = self._registries.client_for(place.registry)
        found = await client.read_manifest(place.repository, place.target)
        await client.put_manifest(
            place.repository, tag, EncodedManifest(found.content, found.media_type, found.digest)
        )

    async def auth(self, host: str) -> str:
        login = await self._credentials.find_login(host)
        if login is None:
            return ""
        told = {"username": login.username, "password": login.password, "serveraddress": host}
        if login.identity:
            told = {"identitytoken": login.identity, "serveraddress": host}
        return base64.urlsafe_b64encode(msgspec.json.encode(told)).decode()

    async def _read_base(self, reference: str, platform: ImagePlatform) -> BaseImage:
        place = parse_reference(reference)
        client = self._registries.client_for(place.registry)
        resolved: Resolved = await resolve_base(client, place, (platform,))
        manifest = resolved.images[0]
        config = await self._read_config(client, place.repository, manifest)
        sizes = await run_concurrently(
            *(self._estimate_unpacked(client, place.repository, one) for one in manifest.layers)
        )
        layers = tuple(
            BaseLayer(digest=blob.digest, size=blob.size, diff_id=diff_id)
            for blob, diff_id in zip(manifest.layers, config.rootfs.diff_ids, strict=False)
        )
        return BaseImage(
            digest=resolved.digest, config=manifest.config.digest, layers=layers, unpacked=sum(sizes)
        )

    async def _read_config(
        self, client: RegistryClient, repository: str, manifest: ImageManifest
    ) -> _ImageConfig:
        blob = manifest.config
        content = await client.read_blob(repository, blob.digest, blob.size, LARGEST_CONFIG)
        return msgspec.json.decode(content, type=_ImageConfig)

    async def _estimate_unpacked(self, client: RegistryClient, repository: str, blob: BlobDescriptor) -> int:
        """Return an estimate of a layer's unpacked size; a gzip file ends with the size of its content."""
        try:
            tail = await client.read_tail(repository, blob.digest, blob.size, 4)
        except AttemptError:
            return int(blob.size * UNPACKED_RATIO)  # an estimate must not fail the image
        told = int.from_bytes(tail, "little")
        return told if len(tail) == 4 and told > blob.size * LEAST_RATIO else int(blob.size * UNPACKED_RATIO)
