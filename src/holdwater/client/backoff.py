"""Limits how long a client retries without progress: back-off with jitter, then `ServerGone`.

The requests themselves are sent by `server_connection.py`.
"""

from __future__ import annotations

import asyncio
import random

from .errors import ServerGone

FIRST = 0.05  # seconds before the second try; short, because a server waits only a few for a lost client
LONGEST = 2.0  # seconds between two tries
MOST_INVALID = 5  # unreadable replies before the peer counts as something other than a holdwater server


class ConnectionLost(Exception):
    """The connection broke, or the server is not ready. The same request can be sent again."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class InvalidReply(ConnectionLost):
    """The reply is not one that a holdwater server sends."""


class ReconnectBackoff:
    """The retry back-off of one order, or of one request."""

    def __init__(self, server: str, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._until: float | None = None  # None: the last try succeeded
        self._tries = 0
        self._invalid = 0

    def reset(self) -> None:
        """Start over: the server responds and works."""
        self._until = None
        self._tries = 0

    async def wait(self, lost: ConnectionLost) -> None:
        """Sleep until the next retry; raise `ServerGone` when the time for retries is used up."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._seconds
        self._invalid += isinstance(lost, InvalidReply)
        left = self._until - now
        if left <= 0 or self._invalid >= MOST_INVALID:
            raise ServerGone(f"the server at `{self._server}` is gone: {lost}", "is it running?") from None
        delay = max(lost.after, min(LONGEST, FIRST * 2**self._tries) * random.uniform(0.5, 1.0))
        self._tries = min(self._tries + 1, 16)
        await asyncio.sleep(min(delay, left))
