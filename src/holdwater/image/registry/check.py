"""Check that a published image is still in its registry, complete and unchanged."""

from __future__ import annotations

from ...core.image import PublishedImage
from .client import UNKNOWN_SIZE, RegistryClient, RegistryClients
from .concurrency import run_concurrently
from .manifest import BlobDescriptor, ImageIndex, parse_manifest
from .reference import ImageReference, parse_reference
from .refusal import RegistryRefusal


async def check_image(registries: RegistryClients, made: PublishedImage, *, deep: bool = False) -> str:
    """Return a description of the damage; empty: none. Raise if the registry cannot be queried."""
    place = parse_reference(made.reference)
    client = registries.client_for(place.registry)
    for tag in (place.tag, *made.aliases):
        held = await _read_tag(client, place, tag)
        if held != made.digest:
            there = f"points to `{held}`, not to `{made.digest}`" if held else "is missing"
            return f"the tag `{place.name}:{tag}` {there}"
    return await find_damage(client, place, made.digest, deep=deep)


async def _read_tag(client: RegistryClient, place: ImageReference, tag: str) -> str:
    try:
        return await client.read_digest(place.repository, tag)
    except RegistryRefusal as error:
        if error.kind == "missing":
            return ""
        raise


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
