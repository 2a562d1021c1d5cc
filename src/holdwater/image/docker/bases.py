"""What the docker engine asks of registries, as a protocol; `registry/lookup.py` asks them."""

from __future__ import annotations

from typing import Protocol

from ...core.image import Platform
from ...core.records import Record


class BaseLayer(Record, frozen=True):
    """A layer of a base, as its registry has it."""

    digest: str
    size: int  # bytes, compressed
    diff_id: str


class Base(Record, frozen=True):
    """An image in a registry."""

    digest: str  # of what the reference leads to: it goes into the key
    config: str  # the digest of its configuration
    layers: tuple[BaseLayer, ...] = ()
    unpacked: int = 0  # bytes, estimated

    @property
    def size(self) -> int:
        """Bytes, compressed."""
        return sum(layer.size for layer in self.layers)

    @property
    def diff_ids(self) -> list[str]:
        return [layer.diff_id for layer in self.layers]


class Bases(Protocol):
    """What this engine asks of registries. Errors are `AttemptError`s."""

    async def base(self, reference: str, platform: Platform) -> Base:
        """What the reference leads to."""

    async def found(self, reference: str) -> tuple[str, str] | None:
        """The digest and the key label of what has this tag; None: nothing has it."""

    async def alias(self, reference: str, tag: str) -> None:
        """Give what the reference leads to this tag as well, in the same repository."""

    async def auth(self, host: str) -> str:
        """The `X-Registry-Auth` header for a registry, which is secret; empty: none."""


def pinned(reference: str, digest: str) -> str:
    """`repository@digest`, whatever tag or digest the reference has."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}@{digest}"


def host_of(name: str) -> str:
    """The registry of a repository's name, as docker reads it."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"
