"""Whether an image that was made is still in its registry, with everything that it consists of."""

from __future__ import annotations

from ...core.image import Made
from .client import Registries, RegistryClient
from .manifest import Index, read
from .reference import Reference, parse
from .refusal import Refusal
from .together import together


async def check(registries: Registries, made: Made) -> str:
    """What is wrong with it, in a sentence; empty: nothing. A registry that cannot tell raises."""
    place = parse(made.reference)
    client = registries.registry(place.registry)
    for tag in (place.tag, *made.aliases):
        held = await _standing(client, place, tag)
        if held != made.digest:
            there = f"stands for `{held}`, not for `{made.digest}`" if held else "is not there"
            return f"the tag `{place.name}:{tag}` {there}"
    return await _lacking(client, place, made.digest)


async def _standing(client: RegistryClient, place: Reference, tag: str) -> str:
    try:
        return await client.head(place.repository, tag)
    except Refusal as error:
        if error.kind == "missing":
            return ""
        raise


async def _lacking(client: RegistryClient, place: Reference, digest: str) -> str:
    """The first thing that a manifest needs and that is not there."""
    name = f"{place.name}@{digest}"
    try:
        found = await client.manifest(place.repository, digest)
    except Refusal as error:
        if error.kind == "missing":
            return f"the manifest `{name}` is not there"
        raise
    manifest = read(name, found.content, found.media_type)
    if isinstance(manifest, Index):
        parts = await together(*(_lacking(client, place, child.digest) for child in manifest.children))
        return next(filter(None, parts), "")
    blobs = list(dict.fromkeys((manifest.config, *manifest.layers)))
    there = await together(*(client.has(place.repository, blob.digest) for blob in blobs))
    lost = [blob.digest for blob, has in zip(blobs, there, strict=True) if not has]
    return f"a blob of `{name}` is not there: `{lost[0]}`" if lost else ""
