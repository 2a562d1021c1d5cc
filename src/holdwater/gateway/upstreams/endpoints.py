"""HTTP upstreams by their address and key: one for all who use it, open while anyone does, and a few longer.

One that nobody uses any more but that still answers calls is left to finish them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from .http import HttpUpstream

IDLE = 4  # upstreams without users that stay open, those that are busy not counted


class Endpoints:
    """`async with Endpoints(stall) as endpoints`."""

    def __init__(self, stall: float) -> None:
        self._stall = stall
        # The longest unused first; bound: those that are in use or busy, and `IDLE`.
        self._open: dict[tuple[str, str | None], _Endpoint] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            _, endpoint = self._open.popitem()
            await endpoint.upstream.__aexit__(None, None, None)

    @asynccontextmanager
    async def use(self, url: str, key: str | None) -> AsyncIterator[HttpUpstream]:
        """The upstream there, for as long as this block runs."""
        upstream = await self.take(url, key)
        try:
            yield upstream
        finally:
            await self.give(url, key)

    async def take(self, url: str, key: str | None) -> HttpUpstream:
        """The upstream there; `give` follows."""
        endpoint = self._open.get((url, key))
        if endpoint is None:
            endpoint = self._open[url, key] = _Endpoint(HttpUpstream(url, key, stall=self._stall))
            await endpoint.upstream.__aenter__()
        endpoint.users += 1
        return endpoint.upstream

    async def give(self, url: str, key: str | None) -> None:
        """One who took it does not use it any more."""
        endpoint = self._open.pop((url, key))
        endpoint.users -= 1
        self._open[url, key] = endpoint
        idle = [name for name, one in self._open.items() if not one.users and not one.upstream.busy]
        closing = [self._open.pop(name) for name in idle[:-IDLE]]
        for endpoint in closing:
            await endpoint.upstream.__aexit__(None, None, None)


class _Endpoint:
    def __init__(self, upstream: HttpUpstream) -> None:
        self.upstream = upstream
        self.users = 0
