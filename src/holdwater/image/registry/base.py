"""Resolve a reference for given platforms to an image, or to an index of several images.

This module reads manifests only; `engine.py` and `path_extraction.py` use them.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.image import ImagePlatform
from .client import RegistryClient
from .concurrency import run_concurrently
from .manifest import ImageIndex, ImageManifest, IndexEntry, choose_entry, parse_manifest
from .reference import ImageReference
from .refusal import unsupported_error


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
    images = tuple(_expect_manifest(name, parse_manifest(name, one.content, one.media_type)) for one in got)
    if len(platforms) > 1:
        return ResolvedBase(reference, found.digest, images, top, children)
    return ResolvedBase(reference, got[0].digest, images)


def _expect_manifest(name: str, found: ImageManifest | ImageIndex) -> ImageManifest:
    if isinstance(found, ImageManifest):
        return found
    raise unsupported_error(f"`{name}` cannot be used", "it is an index of indexes")
