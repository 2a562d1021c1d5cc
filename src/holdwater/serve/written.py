"""What is written to a client, in slices: no faster than it reads, so that little of it waits in memory."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import IO

from aiohttp import web

from ..core.serving import AnyEvent
from .speech import Speech

SERVER = {
    "Server": "holdwater",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",  # text of an agent is never taken for a page
    "Cross-Origin-Resource-Policy": "same-origin",
}
SLICE = 256 * 1024  # bytes that are handed to the transport before it is asked whether it can take more


class Stream:
    """Events, one after the other."""

    def __init__(self, request: web.BaseRequest, speech: Speech, spool: Path | None) -> None:
        self._request = request
        self._speech = speech
        self._spool = spool
        self._response = web.StreamResponse(headers={**SERVER, "Content-Type": speech.stream_kind})

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def tell(self, event: AnyEvent) -> None:
        before, body, after = self._speech.frame(event)
        del event
        if len(body) <= SLICE:
            await self._response.write(before + body + after)
            return
        with _spooled(body, self._spool) as file:
            del body
            await self._response.write(before)
            await _slices(self._response, file)
            if after:
                await self._response.write(after)

    async def keep_alive(self) -> None:
        await self._response.write(self._speech.keep_alive)

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


async def send(request: web.BaseRequest, body: bytes, kind: str, spool: Path | None) -> web.StreamResponse:
    """Answer with a body that may be large; returns when the transport has taken all of it."""
    response = web.StreamResponse(headers={**SERVER, "Content-Type": kind})
    response.content_length = len(body)
    with _spooled(body, spool) as file:
        del body
        await response.prepare(request)
        await _slices(response, file)
    await response.write_eof()
    return response


def _spooled(body: bytes, spool: Path | None) -> IO[bytes]:
    """A large one waits in a file that has no name: what a slow client does not read is no memory."""
    if len(body) <= SLICE:
        return io.BytesIO(body)
    file = tempfile.TemporaryFile(dir=spool, buffering=0)  # noqa: SIM115 (whoever asked closes it)
    file.write(body)
    file.seek(0)
    return file


async def _slices(response: web.StreamResponse, file: IO[bytes]) -> None:
    while piece := file.read(SLICE):
        await response.write(piece)
