"""Limit the request rate to one registry, by its Retry-After and by the user's limit per minute.

A pause applies to all requests to that registry. `host.py` does the retries.
"""

from __future__ import annotations

import asyncio
import random

from ...core.records import Record

_BURST = 2.0  # seconds of the rate that may be used at once


class RegistryRetryPolicy(Record, frozen=True):
    """How often and how long one operation is retried."""

    tries: int = 6
    first: float = 0.25  # seconds before the second attempt; doubles, with jitter
    longest: float = 15.0
    pause: float = 120.0  # seconds: a longer Retry-After counts as a refusal
    waiting: float = 600.0  # seconds of pauses in one operation
    stall: float = 300.0  # seconds without a byte in either direction; storing a large blob takes long

    def delay(self, tried: int) -> float:
        """Return the seconds to wait after `tried` attempts."""
        return min(self.longest, self.first * 2.0 ** (tried - 1)) * random.uniform(0.5, 1.5)


class RequestPace:
    """The pace of requests to one registry. Create it in a running event loop."""

    def __init__(self, requests_a_minute: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._gap = 60.0 / requests_a_minute if requests_a_minute else 0.0
        self._ahead = max(0.0, _BURST - self._gap)
        self._next = 0.0  # time of the next request's turn
        self._until = 0.0  # no request is sent before this time

    def pause(self, seconds: float) -> None:
        """Pause all requests. A longer pause that is already set stays."""
        self._until = max(self._until, self._clock() + seconds)

    async def wait_turn(self, patience: RegistryRetryPolicy) -> float:
        """Wait until a request may be sent and return 0.0; return the pause if it exceeds the policy."""
        if self._gap:
            now = self._clock()
            mine = max(self._next, now - self._ahead)
            self._next = mine + self._gap
            if mine > now:
                await asyncio.sleep(mine - now)
        latest = self._clock() + patience.waiting
        while (seconds := self._until - self._clock()) > 0.0:
            if seconds > patience.pause or self._until > latest:
                return seconds
            await asyncio.sleep(seconds * random.uniform(1.0, 1.1))  # do not resume all requests at once
        return 0.0
