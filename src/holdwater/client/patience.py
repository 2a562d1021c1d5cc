"""How long a client goes on trying while it gets nowhere: back-off with jitter, then `ServerGone`."""

from __future__ import annotations

import asyncio
import random

from .errors import ServerGone

FIRST = 0.05  # seconds before the second try: a server's grace for a lost client is a few
LONGEST = 2.0  # seconds between two tries
NONSENSE = 5  # answers that nobody can read before it counts as something else than a server


class Lost(Exception):
    """The connection broke, or the server cannot work yet. The same can be asked again."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class Garbled(Lost):
    """What came is not what a server says."""


class Patience:
    """That of one order, or of one request."""

    def __init__(self, server: str, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._until: float | None = None  # None: all is well
        self._tries = 0
        self._garbled = 0

    def renew(self) -> None:
        """The server is there, and works."""
        self._until = None
        self._tries = 0

    async def wait(self, lost: Lost) -> None:
        """Until it is worth trying again; raises `ServerGone` when it is not any more."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._seconds
        self._garbled += isinstance(lost, Garbled)
        left = self._until - now
        if left <= 0 or self._garbled >= NONSENSE:
            raise ServerGone(f"the server at `{self._server}` is gone: {lost}", "is it running?") from None
        delay = max(lost.after, min(LONGEST, FIRST * 2**self._tries) * random.uniform(0.5, 1.0))
        self._tries = min(self._tries + 1, 16)
        await asyncio.sleep(min(delay, left))
