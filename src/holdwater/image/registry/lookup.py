"""Look up images in registries: resolve a reference, find a base or a tag, check a published image.

The docker engine finds its bases and logins here. Nothing but an alias is written; `client.py` reads blobs.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, NamedTuple

import msgspec

from ...core.errors import AttemptError, HoldwaterError, ImageFailed, drop_tracebacks
from ...core.image import KEY_LABEL, ImagePlatform, Note, PublishedImage
from ...shielded_wait import SingleFlight
from ..docker.bases import BaseImage, BaseLayer
from .client import UNKNOWN_SIZE, RegistryClient, RegistryClients
from .credentials import RegistryCredentials
from .manifest import (
    LARGEST_CONFIG,
    BlobDescriptor,
    ImageConfig,
    ImageIndex,
    ImageManifest,
    IndexEntry,
    choose_entry,
    parse_manifest,
)
from .reference import ImageReference, parse_reference, parse_repository
from .refusal import RegistryRefusal, unsupported_error

MOST_BASES = 4096  # cached bases: a plan, its attempts and their retries look up the same bases
UNPACKED_RATIO = 3.0  # of unpacked to compressed, if the blob does not show it
LEAST_RATIO = 0.9  # a gzip size below this is modulo 4 GiB, or of the last of several members


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
        found = await client.find_manifest(place.repository, place.target)
        if found is None:
            return None
        manifest = parse_manifest(reference, found.content, found.media_type)
        if not isinstance(manifest, ImageManifest):
            return found.digest, ""
        settings = (await self._read_config(client, place.repository, manifest)).config
        labels = settings.Labels if settings else None
        return found.digest, (labels or {}).get(KEY_LABEL, "")

    async def alias(self, reference: str, tag: str) -> None:
        place = parse_reference(reference)
        client = self._registries.client_for(place.registry)
        found = await client.read_manifest(place.repository, place.target)
        await client.put_manifest(place.repository, tag, found)

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
        resolved = await resolve_base(client, place, (platform,))
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
    ) -> ImageConfig:
        blob = manifest.config
        content = await client.read_blob(repository, blob.digest, blob.size, LARGEST_CONFIG)
        return msgspec.json.decode(content, type=ImageConfig)

    async def _estimate_unpacked(self, client: RegistryClient, repository: str, blob: BlobDescriptor) -> int:
        """Return an estimate of a layer's unpacked size; a gzip file ends with the size of its content."""
        try:
            tail = await client.read_tail(repository, blob.digest, blob.size, 4)
        except AttemptError:
            return int(blob.size * UNPACKED_RATIO)  # an estimate must not fail the image
        told = int.from_bytes(tail, "little")
        return told if len(tail) == 4 and told > blob.size * LEAST_RATIO else int(blob.size * UNPACKED_RATIO)


class PushChecks:
    """Tries for each target repository once whether an upload to it may begin."""

    def __init__(self, registries: RegistryClients, note: Note) -> None:
        self._registries = registries
        self._note = note
        self._flights: SingleFlight[None] = SingleFlight()
        self._refusals: dict[str, ImageFailed | None] = {}  # bound: the repositories of a recipe

    async def check(self, repository: str) -> None:
        """Raise if the registry refuses images in this repository."""
        if repository not in self._refusals:
            await self._flights.join(repository, lambda: self._try_upload(repository))
        if (refusal := self._refusals[repository]) is not None:
            raise ImageFailed(refusal.message, refusal.hint, kind=refusal.kind, again=refusal.again)

    async def _try_upload(self, repository: str) -> None:
        place = parse_repository(repository)
        client = self._registries.client_for(place.registry)
        try:
            location = await client.begin_upload(place.repository)
        except ImageFailed as error:
            self._refusals[repository] = error
            drop_tracebacks(error)
            return
        self._refusals[repository] = None
        try:
            await client.cancel(place.repository, location)
        except ImageFailed as error:  # the registry drops it after a while
            self._note("cleanup.failed", error.message)


class ResolvedBase(NamedTuple):
    """A resolved reference: an image for each requested platform."""

    reference: ImageReference
    digest: str  # of the image's manifest; of the index for several platforms
    images: tuple[ImageManifest, ...]
    several: ImageIndex | None = None  # the index, if several platforms were requested
    children: tuple[IndexEntry, ...] = ()  # the entries of the index, in the order of `images`


async def resolve_base(
    client: RegistryClient, reference: ImageReference, platforms: tuple[ImagePlatform, ...]
) -> ResolvedBase:
    """Return the images that `reference` resolves to now."""
    name = str(reference)
    found = await client.read_manifest(reference.repository, reference.target)
    top = parse_manifest(name, found.content, found.media_type)
    if isinstance(top, ImageManifest):
        if len(platforms) > 1:
            asked = ", ".join(f"`{platform}`" for platform in platforms)
            raise unsupported_error(f"`{name}` cannot be used", f"it is for one platform, not for {asked}")
        return ResolvedBase(reference, found.digest, (top,))
    children = tuple(choose_entry(top, platform) for platform in platforms)
    got = await run_concurrently(
        *(client.read_manifest(reference.repository, child.digest) for child in children)
    )
    parsed = [parse_manifest(name, one.content, one.media_type) for one in got]
    images = tuple(one for one in parsed if isinstance(one, ImageManifest))
    if len(images) < len(parsed):
        raise unsupported_error(f"`{name}` cannot be used", "it is an index of indexes")
    if len(platforms) > 1:
        return ResolvedBase(reference, found.digest, images, top, children)
    return ResolvedBase(reference, got[0].digest, images)


async def check_image(registries: RegistryClients, made: PublishedImage, *, deep: bool = False) -> str:
    """Return a description of the damage; empty: none. Raise if the registry cannot be queried."""
    place = parse_reference(made.reference)
    client = registries.client_for(place.registry)
    for tag in (place.tag, *made.aliases):
        try:
            held = await client.read_digest(place.repository, tag)
        except RegistryRefusal as error:
            if error.kind != "missing":
                raise
            held = ""
        if held != made.digest:
            there = f"points to `{held}`, not to `{made.digest}`" if held else "is missing"
            return f"the tag `{place.name}:{tag}` {there}"
    return await find_damage(client, place, made.digest, deep=deep)


async def find_damage(
    client: RegistryClient, place: ImageReference, digest: str, *, deep: bool = False
) -> str:
    """Return a description of the first part that is missing or does not match its digest; empty: none.

    The check reads manifests and configurations. It requests only the sizes of layers, unless `deep` is set.
    """
    name = f"{place.name}@{digest}"
    try:
        found = await client.read_manifest(place.repository, digest)
    except RegistryRefusal as error:
        if error.kind == "missing":
            return f"the manifest `{name}` is missing"
        return _describe_damage(error)
    manifest = parse_manifest(name, found.content, found.media_type)
    if isinstance(manifest, ImageIndex):
        children = (child.digest for child in manifest.children)
        parts = await run_concurrently(*(find_damage(client, place, child, deep=deep) for child in children))
    else:
        layers = dict.fromkeys(manifest.layers)
        parts = await run_concurrently(
            _check_content(client, place, manifest.config),
            *((_check_content if deep else _check_size)(client, place, layer) for layer in layers),
        )
    wrong = next(filter(None, parts), "")
    return wrong if not wrong or isinstance(manifest, ImageIndex) else f"a blob of `{name}`: {wrong}"


async def _check_size(client: RegistryClient, place: ImageReference, blob: BlobDescriptor) -> str:
    size = await client.measure(place.repository, blob.digest)
    if size is None:
        return f"`{blob.digest}` is missing"
    known = size in (blob.size, UNKNOWN_SIZE)
    return "" if known else f"`{blob.digest}` has {size} bytes, not {blob.size}"


async def _check_content(client: RegistryClient, place: ImageReference, blob: BlobDescriptor) -> str:
    """Read the blob to its end and verify it, without keeping it."""
    try:
        async with client.open_blob(place.repository, blob.digest, blob.size) as flow:
            async for _ in flow:
                pass
    except RegistryRefusal as error:
        return f"`{blob.digest}` is missing" if error.absent_blob else _describe_damage(error)
    return ""


def _describe_damage(error: RegistryRefusal) -> str:
    """Return the message of a digest mismatch; raise any other error again."""
    if error.kind != "digest":
        raise error
    return error.message


async def run_concurrently(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run the jobs concurrently; return their results. Raise the first `HoldwaterError` without its group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        ours = next((error for error in errors.exceptions if isinstance(error, HoldwaterError)), None)
        if ours is None:
            raise
        drop_tracebacks(errors)
    else:
        return [task.result() for task in tasks]
    raise ours
