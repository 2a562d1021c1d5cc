"""How fast one registry is asked: what it demands by Retry-After, and what the user allows a minute.

A pause holds for everyone who asks that registry. How often something is tried is in `host.py`.
"""

from __future__ import annotations

import asyncio
import random

from ...core.records import Record

_BURST = 2.0  # seconds' worth of a rate that may be used at once


class Patience(Record, frozen=True):
    """How long one operation goes on against trouble."""

    tries: int = 6
    first: float = 0.25  # seconds before the second try; doubles, with jitter
    longest: float = 15.0
    pause: float = 120.0  # seconds: a registry that asks for more has refused
    waiting: float = 600.0  # seconds of pauses in one operation
    stall: float = 300.0  # seconds without a byte in either direction; storing a large blob takes long

    def delay(self, tried: int) -> float:
        """Seconds after so many tries."""
        return min(self.longest, self.first * 2.0 ** (tried - 1)) * random.uniform(0.5, 1.5)


class Pace:
    """Made in a running loop."""

    def __init__(self, requests_a_minute: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._gap = 60.0 / requests_a_minute if requests_a_minute else 0.0
        self._ahead = max(0.0, _BURST - self._gap)
        self._next = 0.0  # when the next request has its turn
        self._until = 0.0  # nobody asks before

    def pause(self, seconds: float) -> None:
        """Everyone waits. A pause that is longer already stays."""
        self._until = max(self._until, self._clock() + seconds)

    async def turn(self, patience: Patience) -> float:
        """Returns when a request may be sent: 0.0, or how much too long the wait would be."""
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
            await asyncio.sleep(seconds * random.uniform(1.0, 1.1))  # not all in the same instant
        return 0.0
