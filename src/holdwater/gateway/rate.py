"""The rate that a run keeps of its own accord: requests and tokens a minute, this worker's share of them.

Those who wait are served in the order in which they came. What an upstream asks for is in `upstreams/`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager

BURST = 2.0  # seconds' worth of a rate that may be used at once
LEARNING = 0.2  # the weight of the latest call in what a call is expected to use


class Bucket:
    """Fills at a rate up to what may be used at once; what is used beyond that is paid back first."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / 60.0
        self._most = max(1.0, self._rate * BURST)
        self._level = self._most
        self._at = now

    def delay(self, need: float, now: float) -> float:
        """Seconds until `need` is there; what can never be there at once counts as a full bucket."""
        self._fill(now)
        return max(0.0, (min(need, self._most) - self._level) / self._rate)

    def take(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def give(self, amount: float) -> None:
        """What was taken and not used."""
        self._level += amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + (now - self._at) * self._rate)
        self._at = now


class Rate:
    """Made in a running loop. None: no such limit."""

    def __init__(self, rpm: float | None, tpm: float | None, share: float = 1.0) -> None:
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._requests = Bucket(rpm * share, now) if rpm is not None else None
        self._tokens = Bucket(tpm * share, now) if tpm is not None else None
        self._expected = 1.0  # tokens of a call: they are known only when it is over
        self._line = asyncio.Lock()  # first come, first served

    @asynccontextmanager
    async def turn(self, waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[None]:
        """A call, when its turn has come; `waiting` is entered while it has not."""
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
        """What a call that had its turn used in the end."""
        self._expected += (tokens - self._expected) * LEARNING
        if self._tokens is not None:
            self._tokens.take(tokens, self._clock())

    async def _pause(self) -> None:
        """Only the first in line gets here."""
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
