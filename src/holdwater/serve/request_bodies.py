"""Reads request bodies, with limits on the size of each, on the size of all together, and on time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from ..core.errors import RequestRefused

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
