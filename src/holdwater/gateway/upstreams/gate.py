"""How many calls an upstream is given at once: as many as there are, until it says that it is too much.

Each refusal for overload halves the number, each round of successes adds one. How long a refused call waits
is in `retry.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

Waiting = Callable[[], AbstractContextManager[None]]


class Gate:
    """First come, first served. `enter` and `leave` go in pairs; what came of a call is told in between."""

    def __init__(self) -> None:
        self.limit = math.inf
        self.inside = 0
        self._cut_at = -math.inf  # when the limit was last lowered
        self._successes = 0
        self._line: deque[asyncio.Future[None]] = deque()  # bound: the calls in flight

    async def enter(self, waiting: Waiting) -> float:
        """Wait for a place; when it was taken."""
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
                self.leave()  # its turn had come
            else:
                self._line.remove(turn)
            raise

    def leave(self) -> None:
        self.inside -= 1
        self._admit()

    def refused(self, entered: float) -> None:
        """A call that entered at that time was too much. Those of one burst lower the limit once."""
        if entered > self._cut_at:
            self._cut_at = asyncio.get_running_loop().time()
            self.limit = max(1, min(self.limit, self.inside) // 2)
            self._successes = 0

    def served(self) -> None:
        """A call was answered."""
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
