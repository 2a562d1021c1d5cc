"""The rate limit that a run sets for itself: requests and tokens per minute, and this worker's share of them.

Waiting calls are served in order of arrival. The upstream's own rate limits are handled in `upstreams/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

BURST = 2.0  # seconds' worth of the rate that may be used at once
LEARNING = 0.2  # the weight of the latest call in the expected tokens of a call


class RateBucket:
    """A token bucket that fills at a rate up to its burst size; use beyond that is paid back first."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        self._most = max(1.0, self._rate * BURST)
        self._level = self._most
        self._at = now

    def delay(self, need: float, now: float) -> float:
        """Return the seconds until `need` is available; more than the burst size counts as a full bucket."""
        self._fill(now)
        return max(0.0, (min(need, self._most) - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def give(self, amount: float) -> None:
        """Return an amount that was taken and not used."""
        self._level += amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now


class RateLimiter:
    """Paces calls; create it in a running loop. None: no such limit."""

    def __init__(self, rpm: float | None, tpm: float | None, share: float = 1.0) -> None:
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._requests = RateBucket(rpm * share, now) if rpm is not None else None
        self._tokens = RateBucket(tpm * share, now) if tpm is not None else None
        self._expected = 1.0  # tokens of a call: the actual number is known only after it
        self._line = asyncio.Lock()  # first come, first served

    @asynccontextmanager
    async def turn(self, waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """Run a call when the rate allows it; `waiting` is entered while the call waits."""
        if self._line.locked() or self._delay() > 0.0:
            with waiting():
                async with self._line:
                    await self._pause()
                    held = self._take()
        else:
            held = self._take()
        try:
            yield
        finally:
            if self._tokens is not None:
                self._tokens.give(held)

    def spend(self, tokens: int) -> None:
        """Count the tokens that a call used."""
        self._expected += (tokens - self._expected) * LEARNING
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    async def _pause(self) -> None:
        """Wait until the rate allows the first call in line; only that call gets here."""
        seconds = self._delay()
        while seconds > 0.0:
            await asyncio.sleep(seconds)
            seconds = self._delay()

    def _delay(self) -> float:
        now = self._clock()
        requests = self._requests.delay(1.0, now) if self._requests is not None else 0.0
        tokens = self._tokens.delay(self._expected, now) if self._tokens is not None else 0.0
        return max(requests, tokens)

    def _take(self) -> float:
        now, held = self._clock(), self._expected
        if self._requests is not None:
            self._requests.take(1.0, now)
        if self._tokens is not None:
            self._tokens.take(held, now)
        return held
