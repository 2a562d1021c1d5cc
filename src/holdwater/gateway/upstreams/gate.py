"""Limits the concurrent calls to an upstream: no limit until the upstream reports overload.

Each refusal for overload halves the limit, each round of successes adds one. `retry.py` decides how long a
refused call waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

WaitContext = Callable[[], AbstractContextManager[None]]


class UpstreamGate:
    """First come, first served. Pair `enter` with `leave`, and record the result in between."""

    def __init__(self) -> None:
        self.limit = math.inf
        self.inside = 0
        self._cut_at = -math.inf  # time when the limit was last lowered
        self._successes = 0
        self._line: deque[asyncio.Future[None]] = deque()  # bound: the calls in flight

    async def enter(self, waiting: WaitContext) -> float:
        """Wait for admission; return the time of entry."""
        if self._line or self.inside >= self.limit:
            with waiting():
                await self._wait()
        else:
            self.inside += 1
        return asyncio.get_running_loop().time()

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()  # the call was already admitted
            else:
                self._line.remove(turn)
            raise

    def leave(self) -> None:
        self.inside -= 1
        self._admit()

    def record_refusal(self, entered: float) -> None:
        """Record a refusal of a call that entered at `entered`. One burst lowers the limit once."""
        if entered > self._cut_at:
            self._cut_at = asyncio.get_running_loop().time()
            self.limit = max(1, min(self.limit, self.inside) // 2)
            self._successes = 0

    def record_success(self) -> None:
        """Record an answered call."""
        if self.limit is not math.inf:
            self._successes += 1
            if self._successes >= self.limit:
                self._successes = 0
                self.limit += 1
                self._admit()

    def _admit(self) -> None:
        while self._line and self.inside < self.limit:
            turn = self._line.popleft()
            if not turn.done():
                self.inside += 1
                turn.set_result(None)
