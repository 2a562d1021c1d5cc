"""Lists and removes build cache records of the builder in the daemon, which is the only builder that we use.

`image/docker/ownership.py` decides which records are ours.
"""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import Any, Protocol

from ..core.records import Record
from .client import DockerClient, DockerError
from .versions import make_prune_query, make_usage_query

PATIENCE = 30.0  # seconds to wait while the daemon serves another client's query
PAUSE = 0.1  # seconds before the query is repeated

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(\.\d+)?(?:Z| ?([+-]\d\d):?(\d\d))")


class CacheRecord(Record, frozen=True):
    """One cache record, as the daemon reports it."""

    id: str
    created: float  # seconds since the epoch, on the daemon's clock
    description: str = ""
    kind: str = "regular"
    parents: tuple[str, ...] = ()
    in_use: bool = False
    shared: bool = False  # whether an image has the same layer
    size: int = 0


class BuildCache(Protocol):
    """A build cache."""

    async def records(self) -> list[CacheRecord]:
        """Return all records, also those of other users."""

    async def remove(self, record: str) -> bool:
        """Remove a record; return whether it is gone. A record in use or with children stays."""


class DaemonCache:
    """The cache of the builder in the daemon."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    async def records(self) -> list[CacheRecord]:
        told = await self._read_usage()
        return [_parse_record(one) for one in told.get("BuildCache") or ()]

    async def _read_usage(self) -> dict[str, Any]:
        """Query the disk usage. The daemon computes it for one client at a time and refuses the others."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE
        while True:
            try:
                told: dict[str, Any] = await self._client.get(
                    "/system/df", make_usage_query(self._client.api)
                )
            except DockerError as error:
                if "already running" not in error.message or loop.time() > until:
                    raise
            else:
                return told
            await asyncio.sleep(PAUSE)

    async def remove(self, record: str) -> bool:
        told = await self._client.post("/build/prune", make_prune_query(self._client.api, record))
        return record in (told.get("CachesDeleted") or ())


async def read_daemon_time(client: DockerClient) -> float:
    """Return the time on the daemon's clock, which its records use."""
    return parse_go_time((await client.get("/info"))["SystemTime"])


def parse_go_time(text: str) -> float:
    """Parse a time in Go's format; return seconds since the epoch."""
    found = _TIME.search(text)
    if found is None:
        raise DockerError(f"invalid time: {text!r}")
    offset = f"{found[4]}:{found[5]}" if found[4] else "+00:00"
    whole = datetime.fromisoformat(f"{found[1]}T{found[2]}{offset}").timestamp()
    return whole + float(found[3] or 0)


def _parse_record(one: dict[str, Any]) -> CacheRecord:
    parents = one.get("Parents") or ([one["Parent"]] if one.get("Parent") else [])
    return CacheRecord(
        id=one["ID"],
        created=parse_go_time(one["CreatedAt"]),
        description=one.get("Description", ""),
        kind=one.get("Type", "regular"),
        parents=tuple(parents),
        in_use=one.get("InUse", False),
        shared=one.get("Shared", False),
        size=one.get("Size", 0),
    )
