"""A pool of HTTP upstreams by URL and key: shared, open while in use, and a few idle ones longer.

An upstream without users that still has calls in flight stays open until they end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from .http import HttpUpstream

MOST_IDLE = 4  # upstreams without users that stay open, not counting busy ones


class EndpointPool:
    """`async with EndpointPool(stall) as endpoints`."""

    def __init__(self, stall: float) -> None:
        self._stall = stall
        # The longest unused first; bound: the upstreams in use or busy, and `MOST_IDLE`.
        self._open: dict[tuple[str, str | None], _PooledEndpoint] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._open:
            _, endpoint = self._open.popitem()
            await endpoint.upstream.__aexit__(None, None, None)

    @asynccontextmanager
    async def use(self, url: str, key: str | None) -> AsyncIterator[HttpUpstream]:
        """Use the upstream at `url` inside this block."""
        upstream = await self.take(url, key)
        try:
            yield upstream
        finally:
            await self.give(url, key)

    async def take(self, url: str, key: str | None) -> HttpUpstream:
        """Return the upstream at `url`; the caller must call `give` later."""
        endpoint = self._open.get((url, key))
        if endpoint is None:
            endpoint = self._open[url, key] = _PooledEndpoint(HttpUpstream(url, key, stall=self._stall))
            await endpoint.upstream.__aenter__()
        endpoint.users += 1
        return endpoint.upstream

    async def give(self, url: str, key: str | None) -> None:
        """Release an upstream that `take` returned."""
        endpoint = self._open.pop((url, key))
        endpoint.users -= 1
        self._open[url, key] = endpoint
        idle = [name for name, one in self._open.items() if not one.users and not one.upstream.busy]
        closing = [self._open.pop(name) for name in idle[:-MOST_IDLE]]
        for endpoint in closing:
            await endpoint.upstream.__aexit__(None, None, None)


class _PooledEndpoint:
    def __init__(self, upstream: HttpUpstream) -> None:
        self.upstream = upstream
        self.users = 0
