"""Whether an image that was made is still in its registry, whole and unaltered."""

from __future__ import annotations

from ...core.image import Made
from .client import UNKNOWN, Registries, RegistryClient
from .manifest import Blob, Index, read
from .reference import Reference, parse
from .refusal import Refusal
from .together import together


async def check(registries: Registries, made: Made, *, deep: bool = False) -> str:
    """What is wrong with it, in a sentence; empty: nothing. A registry that cannot tell raises."""
    place = parse(made.reference)
    client = registries.registry(place.registry)
    for tag in (place.tag, *made.aliases):
        held = await _standing(client, place, tag)
        if held != made.digest:
            there = f"stands for `{held}`, not for `{made.digest}`" if held else "is not there"
            return f"the tag `{place.name}:{tag}` {there}"
    return await find_damage(client, place, made.digest, deep=deep)


async def _standing(client: RegistryClient, place: Reference, tag: str) -> str:
    try:
        return await client.head(place.repository, tag)
    except Refusal as error:
        if error.kind == "missing":
            return ""
        raise


async def find_damage(client: RegistryClient, place: Reference, digest: str, *, deep: bool = False) -> str:
    """The first part of an image that is not there, or not what its digest stands for; empty: none.

    Manifests and configurations are read. Layers are asked for their size, and read where `deep` says so.
    """
    name = f"{place.name}@{digest}"
    try:
        found = await client.manifest(place.repository, digest)
    except Refusal as error:
        if error.kind == "missing":
            return f"the manifest `{name}` is not there"
        return _damaged(error)
    manifest = read(name, found.content, found.media_type)
    if isinstance(manifest, Index):
        children = (child.digest for child in manifest.children)
        parts = await together(*(find_damage(client, place, child, deep=deep) for child in children))
    else:
        layers = dict.fromkeys(manifest.layers)
        parts = await together(
            _read(client, place, manifest.config),
            *((_read if deep else _measure)(client, place, layer) for layer in layers),
        )
    wrong = next(filter(None, parts), "")
    return wrong if not wrong or isinstance(manifest, Index) else f"a blob of `{name}`: {wrong}"


async def _measure(client: RegistryClient, place: Reference, blob: Blob) -> str:
    size = await client.measure(place.repository, blob.digest)
    if size is None:
        return f"`{blob.digest}` is not there"
    known = size in (blob.size, UNKNOWN)
    return "" if known else f"`{blob.digest}` has {size} bytes, not {blob.size}"


async def _read(client: RegistryClient, place: Reference, blob: Blob) -> str:
    """Read it to its end, without keeping any of it."""
    try:
        async with client.blob(place.repository, blob.digest, blob.size) as flow:
            async for _ in flow:
                pass
    except Refusal as error:
        return f"`{blob.digest}` is not there" if error.absent_blob else _damaged(error)
    return ""


def _damaged(error: Refusal) -> str:
    """What a registry has in the place of something else; a registry that cannot tell raises."""
    if error.kind != "digest":
        raise error
    return error.message
