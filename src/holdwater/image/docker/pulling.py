"""Pulls an image by its digest, and says beforehand what of it a daemon lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core.image import Platform
from ...docker.client import DaemonGone, DockerClient, DockerError
from . import causes
from .bases import Base, Bases, host_of
from .janitor import Janitor

NO_AUTH = "e30="  # `{}`: daemons want the header in any case


async def missing(client: DockerClient, janitor: Janitor, reference: str, base: Base) -> tuple[int, int]:
    """Bytes to download, and bytes that they take unpacked, of what the daemon does not have."""
    if await client.found(f"/images/{reference}/json") is not None:
        return 0, 0
    lacking = base.layers[janitor.held(base.diff_ids) :]
    download = sum(layer.size for layer in lacking)
    return download, round(base.unpacked * download / base.size) if base.size else 0


class Puller:
    """Who pulls, for one platform."""

    def __init__(self, client: DockerClient, bases: Bases, platform: Platform) -> None:
        self._client = client
        self._bases = bases
        self._platform = platform

    async def pull(
        self, reference: str, base: Base, doing: str, tell: Callable[[int], None] = lambda bytes_: None
    ) -> int:
        """Bytes that came; `tell` hears of them while they do, `doing` begins what is said otherwise."""
        name, _, digest = reference.partition("@")
        sizes = {layer.digest.partition(":")[2][:12]: layer.size for layer in base.layers}
        query = {"fromImage": name, "tag": digest, "platform": str(self._platform)}
        seen: dict[str, int] = {}  # bound: the base's layers
        try:
            async for message in self._client.stream("/images/create", query, await self.auth(name)):
                if (one := message.get("id", "")) in sizes:
                    seen[one] = _fetched(message, seen.get(one, 0), sizes[one])
                    tell(sum(seen.values()))
        except DaemonGone:
            raise
        except DockerError as error:
            raise causes.of_transfer(doing, error.message) from error
        return sum(seen.values())

    async def auth(self, name: str) -> dict[str, str]:
        """The header with which a repository is pulled from or pushed to."""
        return {"X-Registry-Auth": await self._bases.auth(host_of(name)) or NO_AUTH}


def _fetched(message: dict[str, Any], before: int, size: int) -> int:
    """Bytes of a layer that are here by now."""
    status = message.get("status")
    if status in ("Download complete", "Pull complete", "Verifying Checksum"):
        return size
    if status == "Downloading":
        return min(size, int((message.get("progressDetail") or {}).get("current") or before))
    return before
