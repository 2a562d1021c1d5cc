"""Sends keep-alive events to a client while its upstream is silent in mid-stream, so no proxy disconnects.

It costs one timer per stream; a task is created only when there is something to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

ResponseOpener = Callable[[], Awaitable[web.StreamResponse]]


class KeepAlive:
    """`async with KeepAlive(sign, every)`. Silent until `start`, and after an error of the connection."""

    def __init__(self, sign: bytes, every: float) -> None:
        self._sign = sign
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._response: web.StreamResponse | None = None
        self._opening: ResponseOpener | None = None
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None  # awaited in `__aexit__`

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
        """Keep `response` alive from now on."""
        self._response = response
        self.mark_sent()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._every, self._on_timer)

    def start_later(self, opening: ResponseOpener) -> None:
        """Open a response for the first keep-alive event, unless one is started before it is due."""
        self._opening = opening
        self.mark_sent()
        self._timer = self._loop.call_later(self._every, self._on_timer)

    async def finish_opening(self) -> None:
        """Open no response from now on; wait until a response that is being opened is open."""
        if self._opening is not None:
            self._opening = None
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def stop(self) -> None:
        """Send nothing more: the end of the stream is next."""
        self._response = None

    def mark_sent(self) -> None:
        """Record that bytes were sent just now."""
        self._last_sent = self._loop.time()

    def _on_timer(self) -> None:
        rest = self._last_sent + self._every - self._loop.time()
        if rest <= 0.0 and (self._writing is None or self._writing.done()):
            self._writing = self._loop.create_task(self._send_sign())
        self._timer = self._loop.call_later(rest if rest > 0.0 else self._every, self._on_timer)

    async def _send_sign(self) -> None:
        try:
            if self._response is None and self._opening is not None:
                self._response = await self._opening()
            if self._response is None:
                return
            await self._response.write(self._sign)
        except ConnectionError:
            pass  # the client disconnected: the call itself gets its own error
