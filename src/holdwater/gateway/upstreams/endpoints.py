"""A pool of HTTP upstreams by URL and key: shared, open while in use, and a few idle ones longer.

An upstream without users that still has calls in flight stays open until they end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

from . import Upstream
from .http import HttpUpstream

MOST_IDLE = 4  # upstreams without users that stay open, not counting busy ones


class EndpointPool:
    """`async with EndpointPool(stall, adapt) as endpoints`; `adapt` adds to each what it lacks."""

    def __init__(self, stall: float, adapt: Callable[[Upstream], Upstream] = lambda server: server) -> None:
        self._stall = stall
        self._adapt = adapt
        # The longest unused first; bound: the upstreams in use or busy, and `MOST_IDLE`.
        self._open: dict[tuple[str, str | None], _PooledEndpoint] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        while self._open:
            _, endpoint = self._open.popitem()
            await endpoint.upstream.__aexit__(None, None, None)

    @asynccontextmanager
    async def use(self, url: str, key: str | None) -> AsyncIterator[Upstream]:
        """Use the upstream at `url` inside this block."""
        upstream = await self.take(url, key)
        try:
            yield upstream
        finally:
            await self.give(url, key)

    async def take(self, url: str, key: str | None) -> Upstream:
        """Return the upstream at `url`; the caller must call `give` later."""
        endpoint = self._open.get((url, key))
        if endpoint is None:
            server = HttpUpstream(url, key, stall=self._stall)
            endpoint = self._open[url, key] = _PooledEndpoint(server, self._adapt(server))
            await server.__aenter__()
        endpoint.users += 1
        return endpoint.adapted

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
    def __init__(self, upstream: HttpUpstream, adapted: Upstream) -> None:
        self.upstream = upstream
        self.adapted = adapted
        self.users = 0
