"""Writes responses in slices, no faster than the client reads them, so that little data waits in memory."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import IO

from aiohttp import web

from ..core.serving_protocol import AnyOrderEvent
from .wire_format import WireFormat

SERVER_HEADERS = {
    "Server": "holdwater",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",  # browsers must not render an agent's text as a page
    "Cross-Origin-Resource-Policy": "same-origin",
}
SLICE = 256 * 1024  # bytes written to the transport before waiting until it accepts more


class EventWriter:
    """Writes the events of one streamed response."""

    def __init__(self, request: web.BaseRequest, speech: WireFormat, spool: Path | None) -> None:
        self._request = request
        self._format = speech
        self._spool = spool
        self._response = web.StreamResponse(headers={**SERVER_HEADERS, "Content-Type": speech.stream_type})

    async def begin(self) -> None:
        await self._response.prepare(self._request)

    async def write_event(self, event: AnyOrderEvent) -> None:
        before, body, after = self._format.frame(event)
        del event
        if len(body) <= SLICE:
            await self._response.write(before + body + after)
            return
        with _open_spool(body, self._spool) as file:
            del body
            await self._response.write(before)
            await _write_slices(self._response, file)
            if after:
                await self._response.write(after)

    async def keep_alive(self) -> None:
        await self._response.write(self._format.keep_alive)

    async def end(self) -> web.StreamResponse:
        await self._response.write_eof()
        return self._response


async def send_body(
    request: web.BaseRequest, body: bytes, kind: str, spool: Path | None
) -> web.StreamResponse:
    """Send a response with a body of any size; return when the transport has accepted all of it."""
    response = web.StreamResponse(headers={**SERVER_HEADERS, "Content-Type": kind})
    response.content_length = len(body)
    with _open_spool(body, spool) as file:
        del body
        await response.prepare(request)
        await _write_slices(response, file)
    await response.write_eof()
    return response


def _open_spool(body: bytes, spool: Path | None) -> IO[bytes]:
    """Return the body as a file. A large one goes to disk, unnamed, so that a slow client costs no memory."""
    if len(body) <= SLICE:
        return io.BytesIO(body)
    file = tempfile.TemporaryFile(dir=spool, buffering=0)  # noqa: SIM115 (the caller closes it)
    file.write(body)
    file.seek(0)
    return file


async def _write_slices(response: web.StreamResponse, file: IO[bytes]) -> None:
    while piece := file.read(SLICE):
        await response.write(piece)
