"""Reads request bodies within limits on size and time, and writes responses no faster than clients read them.

All bodies together have a limit too, and large responses wait in files, so that little data waits in memory.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

from aiohttp import web

from ..core.errors import RequestRefused
from ..core.serving_protocol import AnyOrderEvent
from .wire_format import WireFormat

SERVER_HEADERS = {
    "Server": "holdwater",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",  # browsers must not render an agent's text as a page
    "Cross-Origin-Resource-Policy": "same-origin",
}
SLICE = 256 * 1024  # bytes written to the transport before waiting until it accepts more
AT_ONCE = 2  # times the largest body: the limit for the bodies of all clients together
LONGEST_SILENCE = 15.0  # seconds between two chunks of a body
LONGEST = 300.0  # seconds for a whole body


class BoundedBodies:
    """The request bodies in memory: being read, or read and not yet processed."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._held = 0

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """Read the body of `request`; it counts towards the limit until the block ends."""
        body = bytearray()
        self._check(request)
        try:
            await self._read_bounded(body, request)
            yield body
        finally:
            self._held -= len(body)

    def _check(self, request: web.BaseRequest) -> None:
        """Refuse a body by its headers, before the first byte is read."""
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise RequestRefused("invalid", f"`Content-Encoding` is not supported: `{encoding[:40]}`")
        if (request.content_length or 0) > self._largest:
            raise self._too_large()

    async def _read_bounded(self, body: bytearray, request: web.BaseRequest) -> None:
        try:
            async with asyncio.timeout(LONGEST):
                await self._fill(body, request)
        except TimeoutError:
            raise RequestRefused("invalid", "timed out while reading the body") from None
        except web.RequestPayloadError as error:
            raise RequestRefused("invalid", f"the body cannot be read: {error}") from None

    async def _fill(self, body: bytearray, request: web.BaseRequest) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # aiohttp counts it as the start of the response
        while True:
            async with asyncio.timeout(LONGEST_SILENCE):
                piece = await request.content.readany()
            if not piece:
                return
            if len(body) + len(piece) > self._largest:
                raise self._too_large()
            if self._held + len(piece) > AT_ONCE * self._largest:
                raise RequestRefused("busy", "too many request bodies in memory", after=1.0)
            self._held += len(piece)
            body += piece

    def _too_large(self) -> RequestRefused:
        return RequestRefused(
            "too_large",
            f"the body exceeds the limit of {self._largest} bytes",
            "put large files into the suite, on the server",
        )


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
