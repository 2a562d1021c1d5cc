"""Base images: their lookups in a registry as a protocol, the bytes that a daemon lacks, and the pull.

`registry/lookup.py` implements the protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from ...core.image import ImagePlatform
from ...core.records import Record
from ...docker.client import DaemonGone, DockerClient, DockerError
from . import failure_causes
from .daemon import has_image
from .janitor import Janitor
from .journal import BasePulled

NO_AUTH = "e30="  # `{}`: daemons require the header even without credentials


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


async def measure_missing(
    client: DockerClient, janitor: Janitor, reference: str, base: BaseImage
) -> tuple[int, int]:
    """Return the bytes to download and their unpacked size, for the layers that the daemon lacks."""
    if await has_image(client, reference):
        return 0, 0
    lacking = base.layers[janitor.count_layers(base.diff_ids) :]
    download = sum(layer.size for layer in lacking)
    return download, round(base.unpacked * download / base.size) if base.size else 0


class ImagePuller:
    """Pulls images for one platform."""

    def __init__(self, client: DockerClient, bases: BaseLookup, platform: ImagePlatform) -> None:
        self._client = client
        self._bases = bases
        self._platform = platform

    async def pull(
        self, reference: str, base: BaseImage, doing: str, tell: Callable[[int], None] = lambda bytes_: None
    ) -> int:
        """Pull an image; return the bytes downloaded.

        `tell` receives the running total; `doing` begins the message of an error.
        """
        name, _, digest = reference.partition("@")
        sizes = {layer.digest.partition(":")[2][:12]: layer.size for layer in base.layers}
        query = {"fromImage": name, "tag": digest, "platform": str(self._platform)}
        seen: dict[str, int] = {}  # bound: the base's layers
        try:
            async for message in self._client.stream("/images/create", query, await self.auth_headers(name)):
                if (one := message.get("id", "")) in sizes:
                    seen[one] = _count_fetched(message, seen.get(one, 0), sizes[one])
                    tell(sum(seen.values()))
        except DaemonGone:
            raise
        except DockerError as error:
            raise failure_causes.transfer_error(doing, error.message) from error
        return sum(seen.values())

    async def auth_headers(self, name: str) -> dict[str, str]:
        """Return the header for pulls from and pushes to a repository."""
        return {"X-Registry-Auth": await self._bases.auth(host_of(name)) or NO_AUTH}


class BaseKeeper(Janitor):
    """A janitor that keeps the bases it pulled for the next run, as far as its cache allows."""

    def record_pulled(self, reference: str, size: int) -> None:
        if (base := self._contents.bases.get(reference)) is not None:
            self._open_journal.write(BasePulled(replace(base, size=size, used=time.time(), warm=True)))


def _count_fetched(message: dict[str, Any], before: int, size: int) -> int:
    """Return the bytes of a layer that are downloaded so far."""
    status = message.get("status")
    if status in ("Download complete", "Pull complete", "Verifying Checksum"):
        return size
    if status == "Downloading":
        return min(size, int((message.get("progressDetail") or {}).get("current") or before))
    return before
