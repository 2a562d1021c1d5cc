"""Detects the death of a docker daemon, even if it restarts at once: an open connection ends with the daemon.

A service manager may keep the socket of a restarting daemon, so that no request fails although its
containers are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from .client import DockerClient, DockerError

RECONNECT_PAUSE = 0.2  # seconds before a new connection attempt
NO_EVENTS = '{"event": ["none"]}'  # a filter that matches no event


class DaemonWatch:
    """Watches a client's daemon while it is open; `client.lost_at` is the time of the daemon's death."""

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

    def make_death_check(self) -> Callable[[], bool]:
        """Return a function that says whether the daemon has died since this call."""
        began = time.monotonic()
        return lambda: self._client.lost_at >= began

    async def _follow(self) -> None:
        while True:
            try:
                query = {"filters": NO_EVENTS}
                async with self._client.open_body("GET", "/events", query, silence=None) as pieces:
                    async for _ in pieces:
                        pass
                self._client.mark_lost()
            except DockerError:
                pass  # the client has recorded it
            await asyncio.sleep(RECONNECT_PAUSE)
