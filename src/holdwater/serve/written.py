"""What is written to a client, in slices: no faster than it reads, so that little of it waits in memory."""

from __future__ import annotations

from aiohttp import web

from ..core.serving import AnyEvent
from .speech import Speech

SERVER = {"Server": "holdwater", "Cache-Control": "no-store"}
SLICE = 256 * 1024  # bytes that are handed to the transport before it is asked whether it can take more


class Stream:
    """Events, one after the other."""

    def __init__(self, request: web.BaseRequest, speech: Speech) -> None:
        self._request = request
        self._speech = speech
        self._response = web.StreamResponse(headers={**SERVER, "Content-Type": speech.stream_kind})

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def tell(self, event: AnyEvent) -> None:
        before, body, after = self._speech.frame(event)
        if len(body) <= SLICE:
            await self._response.write(before + body + after)
        else:
            await self._response.write(before)
            await _slices(self._response, body)
            if after:
                await self._response.write(after)

    async def keep_alive(self) -> None:
        await self._response.write(self._speech.keep_alive)

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


async def send(request: web.BaseRequest, body: bytes, kind: str) -> web.StreamResponse:
    """Answer with a body that may be large; returns when the transport has taken all of it."""
    response = web.StreamResponse(headers={**SERVER, "Content-Type": kind})
    response.content_length = len(body)
    await response.prepare(request)
    await _slices(response, body)
    await response.write_eof()
    return response


async def _slices(response: web.StreamResponse, body: bytes) -> None:
    view = memoryview(body)
    for at in range(0, len(body), SLICE):
        await response.write(view[at : at + SLICE])
