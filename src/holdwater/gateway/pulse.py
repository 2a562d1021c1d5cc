"""A sign of life for a client whose upstream is silent in mid-stream, so that nobody on the way hangs up.

It costs a timer a stream; a task is made only when there is something to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

Opening = Callable[[], Awaitable[web.StreamResponse]]


class Pulse:
    """`async with Pulse(sign, every)`. Silent until `start`, and after an error of the connection."""

    def __init__(self, sign: bytes, every: float) -> None:
        self._sign = sign
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._response: web.StreamResponse | None = None
        self._opening: Opening | None = None
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None  # awaited when the pulse ends

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def start(self, response: web.StreamResponse) -> None:
        """From now on `response` is kept alive."""
        self._response = response
        self.heard()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._every, self._beat)

    def later(self, opening: Opening) -> None:
        """Unless a response is started before its time comes, have it opened for the first sign."""
        self._opening = opening
        self.heard()
        self._timer = self._loop.call_later(self._every, self._beat)

    async def opened(self) -> None:
        """Let nothing be opened from now on; what is being opened is when this returns."""
        if self._opening is not None:
            self._opening = None
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def stop(self) -> None:
        """The end comes: nothing may follow it."""
        self._response = None

    def heard(self) -> None:
        """Something was sent just now."""
        self._heard = self._loop.time()

    def _beat(self) -> None:
        rest = self._heard + self._every - self._loop.time()
        if rest <= 0.0 and (self._writing is None or self._writing.done()):
            self._writing = self._loop.create_task(self._say())
        self._timer = self._loop.call_later(rest if rest > 0.0 else self._every, self._beat)

    async def _say(self) -> None:
        try:
            if self._response is None and self._opening is not None:
                self._response = await self._opening()
            if self._response is None:
                return
            await self._response.write(self._sign)
        except ConnectionError:
            pass  # the client is gone: the call itself is told in its own way
