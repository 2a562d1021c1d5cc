"""The records of the build cache in a daemon: builds of ours go to that builder alone.

Which of them are ours is decided in `image/docker/traces.py`; this only lists them and removes one.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import Any, Protocol

from ..core.records import Record
from .client import DockerClient, DockerError
from .versions import prune_query, usage_query

PATIENCE = 30.0  # seconds for somebody else's question to be answered
PAUSE = 0.1  # seconds before the same question again

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?(?:Z| ?([+-]\d\d):?(\d\d))")


class CacheRecord(Record, frozen=True):
    """One record, as its holder tells of it."""

    id: str
    created: float  # seconds since the epoch, on the daemon's clock
    description: str = ""
    kind: str = "regular"
    parents: tuple[str, ...] = ()
    in_use: bool = False
    shared: bool = False  # an image has the same layer
    size: int = 0


class BuildCache(Protocol):
    """A build cache."""

    async def records(self) -> list[CacheRecord]:
        """All of them, whoever made them."""

    async def remove(self, record: str) -> bool:
        """Whether it is gone: one in use, or with children, stays."""


class DaemonCache:
    """The cache of the builder in the daemon."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    async def records(self) -> list[CacheRecord]:
        told = await self._usage()
        return [_record(one) for one in told.get("BuildCache") or ()]

    async def _usage(self) -> dict[str, Any]:
        """A daemon counts for one at a time, and refuses the others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while True:
            try:
                told: dict[str, Any] = await self._client.get("/system/df", usage_query(self._client.api))
            except DockerError as error:
                if "already running" not in error.message or loop.time() > until:
                    raise
            else:
                return told
            await asyncio.sleep(PAUSE)

    async def remove(self, record: str) -> bool:
        told = await self._client.post("/build/prune", prune_query(self._client.api, record))
        return record in (told.get("CachesDeleted") or ())


def seconds(text: str) -> float:
    """A time as Go writes it, since the epoch."""
    found = _TIME.search(text)
    if found is None:
        raise DockerError(f"not a time: {text!r}")
    offset = f"{found[4]}:{found[5]}" if found[4] else "+00:00"
    whole = datetime.fromisoformat(f"{found[1]}T{found[2]}{offset}").timestamp()
    return whole + float(found[3] or 0)


def _record(one: dict[str, Any]) -> CacheRecord:
    parents = one.get("Parents") or ([one["Parent"]] if one.get("Parent") else [])
    return CacheRecord(
        id=one["ID"],
        created=seconds(one["CreatedAt"]),
        description=one.get("Description", ""),
        kind=one.get("Type", "regular"),
        parents=tuple(parents),
        in_use=one.get("InUse", False),
        shared=one.get("Shared", False),
        size=one.get("Size", 0),
    )
