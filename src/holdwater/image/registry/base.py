"""What a reference stands for on certain platforms: an image, or an index of several.

Reads manifests alone. What is made of them is in `append.py` and `pick.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from ...core.image import Platform
from .client import RegistryClient
from .manifest import Child, Index, Manifest, choose, read
from .reference import Reference
from .refusal import unsupported
from .together import together


class Base(NamedTuple):
    """A resolved reference: an image for each platform that was asked for."""

    reference: Reference
    digest: str  # of the image's manifest; of the index where there are several
    images: tuple[Manifest, ...]
    several: Index | None = None  # where more than one platform was asked for
    children: tuple[Child, ...] = ()  # its entries, in step with `images`


async def resolve(client: RegistryClient, reference: Reference, platforms: tuple[Platform, ...]) -> Base:
    """What the registry has under `reference` now."""
    name = str(reference)
    found = await client.manifest(reference.repository, reference.target)
    top = read(name, found.content, found.media_type)
    if isinstance(top, Manifest):
        if len(platforms) > 1:
            asked = ", ".join(f"`{platform}`" for platform in platforms)
            raise unsupported(f"`{name}` cannot be used", f"it is for one platform, not for {asked}")
        return Base(reference, found.digest, (top,))
    children = tuple(choose(top, platform) for platform in platforms)
    got = await together(*(client.manifest(reference.repository, child.digest) for child in children))
    images = tuple(_image(name, read(name, one.content, one.media_type)) for one in got)
    if len(platforms) > 1:
        return Base(reference, found.digest, images, top, children)
    return Base(reference, got[0].digest, images)


def _image(name: str, found: Manifest | Index) -> Manifest:
    if isinstance(found, Manifest):
        return found
    raise unsupported(f"`{name}` cannot be used", "it is an index of indexes")
