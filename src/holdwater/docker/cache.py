"""The records of a build cache, where they really are: in the daemon, or in a builder of another driver.

Which of them are ours is decided in `image/traces.py`; these only list them and remove one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any, Protocol

from ..core.records import Record
from .client import DockerClient, DockerError
from .versions import DAEMON, Builder, prune_command, prune_query, usage_query

Run = Callable[[list[str]], Awaitable[str]]  # arguments of `docker` -> what it prints

PATIENCE = 30.0  # seconds for somebody else's question to be answered
PAUSE = 0.1  # seconds before the same question again

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
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


class BuilderCache:
    """The cache of a builder with another driver than `docker`: a prune by the API would not touch it."""

    def __init__(self, run: Run, builder: Builder) -> None:
        self._run = run
        self._builder = builder

    async def records(self) -> list[CacheRecord]:
        return parse_usage(await self._run(["buildx", "du", "--builder", self._builder.name, "--verbose"]))

    async def remove(self, record: str) -> bool:
        return record in (await self._run(prune_command(self._builder, record))).split()


def cache_of(builder: Builder, client: DockerClient, run: Run) -> BuildCache:
    """The cache that this builder's builds leave something in."""
    return DaemonCache(client) if builder.driver == DAEMON else BuilderCache(run, builder)


def seconds(text: str) -> float:
    """A time as Go writes it, since the epoch."""
    found = _TIME.search(text)
    if found is None:
        raise DockerError(f"not a time: {text!r}")
    offset = f"{found[4]}:{found[5]}" if found[4] else "+00:00"
    whole = datetime.fromisoformat(f"{found[1]}T{found[2]}{offset}").timestamp()
    return whole + float(found[3] or 0)


def parse_usage(listing: str) -> list[CacheRecord]:
    """What `docker buildx du --verbose` prints."""
    found = []
    for block in re.split(r"\n\s*\n", listing):
        fields = {}
        for line in block.splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields[key.strip().lower()] = value.strip()
        if "id" in fields:
            found.append(_told(fields))
    return found


def _told(fields: dict[str, str]) -> CacheRecord:
    parents = fields.get("parents") or fields.get("parent") or ""
    return CacheRecord(
        id=fields["id"],
        created=seconds(fields["created at"]),
        description=fields.get("description", ""),
        kind=fields.get("type", "regular"),
        parents=tuple(re.findall(r"\w+", parents)),
        in_use=fields.get("reclaimable") == "false",
        shared=fields.get("shared") == "true",
        size=_bytes(fields.get("size", "")),
    )


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


def _bytes(text: str) -> int:
    found = re.match(r"([\d.]+)\s*([kMGT]?B)", text)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0
