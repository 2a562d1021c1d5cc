"""Notices that a docker daemon dies, however soon it is back: a connection that stays open ends with it.

A service manager may keep the socket of a daemon that restarts: no request fails, but containers are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from .client import DockerClient, DockerError

AGAIN = 0.2  # seconds before a connection is tried again
NOTHING = '{"event": ["none"]}'  # a filter that lets no event through


class DaemonWatch:
    """Follows one client's daemon as long as it is open; `client.lost_at` says when the daemon died."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._following: asyncio.Task[None] | None = None  # awaited by `__aexit__`

    async def __aenter__(self) -> DaemonWatch:
        self._following = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    def since(self) -> Callable[[], bool]:
        """Whether, from now on, the daemon has died."""
        began = time.monotonic()
        return lambda: self._client.lost_at >= began

    async def _follow(self) -> None:
        while True:
            try:
                query = {"filters": NOTHING}
                async with self._client.reading("GET", "/events", query, silence=None) as pieces:
                    async for _ in pieces:
                        pass
                self._client.lose()
            except DockerError:
                pass  # the client has noticed
            await asyncio.sleep(AGAIN)
