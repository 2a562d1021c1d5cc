"""The registry lookups that the docker engine needs, as a protocol; `registry/lookup.py` implements it."""

from __future__ import annotations

from typing import Protocol

from ...core.image import ImagePlatform
from ...core.records import Record


class BaseLayer(Record, frozen=True):
    """A layer of a base image in its registry."""

    digest: str
    size: int  # bytes, compressed
    diff_id: str


class BaseImage(Record, frozen=True):
    """A base image in a registry."""

    digest: str  # of the manifest that the reference resolves to; part of the image key
    config: str  # digest of the image's configuration
    layers: tuple[BaseLayer, ...] = ()
    unpacked: int = 0  # bytes, estimated

    @property
    def size(self) -> int:
        """The compressed size in bytes."""
        return sum(layer.size for layer in self.layers)

    @property
    def diff_ids(self) -> list[str]:
        return [layer.diff_id for layer in self.layers]


class BaseLookup(Protocol):
    """Registry lookups of the docker engine. Errors are `AttemptError`s."""

    async def find_base(self, reference: str, platform: ImagePlatform) -> BaseImage:
        """Return the image that the reference resolves to."""

    async def find_tag(self, reference: str) -> tuple[str, str] | None:
        """Return the digest and the key label of the image with this tag; None: no image has the tag."""

    async def alias(self, reference: str, tag: str) -> None:
        """Add a tag, in the same repository, to the image that the reference resolves to."""

    async def auth(self, host: str) -> str:
        """Return the `X-Registry-Auth` header for a registry, which is secret; empty: none."""


def pin_reference(reference: str, digest: str) -> str:
    """Return `repository@digest`, without the tag or digest of the reference."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}@{digest}"


def host_of(name: str) -> str:
    """Return the registry in a repository's name, by docker's rules."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"
