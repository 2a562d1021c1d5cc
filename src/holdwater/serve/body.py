"""Reads the bodies of requests: each within a bound, all together within another, none for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from ..core.errors import Refused

AT_ONCE = 2  # times the largest body: what is being read at once, of all clients
LONGEST_SILENCE = 15.0  # seconds between two pieces of a body
LONGEST = 300.0  # seconds for a whole one


class Bodies:
    """Those that are being read, or have been read and not been made use of."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._held = 0

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytearray]:
        """The body of `request`, while it is made use of."""
        body = bytearray()
        self._check(request)
        try:
            await self._within(body, request)
            yield body
        finally:
            self._held -= len(body)

    def _check(self, request: web.BaseRequest) -> None:
        """Refuse what can be told before the first byte."""
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding != "identity":
            raise Refused("invalid", f"`Content-Encoding` is not supported: `{encoding[:40]}`")
        if (request.content_length or 0) > self._largest:
            raise self._too_large()

    async def _within(self, body: bytearray, request: web.BaseRequest) -> None:
        try:
            async with asyncio.timeout(LONGEST):
                await self._fill(body, request)
        except TimeoutError:
            raise Refused("invalid", "the body stopped coming") from None
        except web.RequestPayloadError as error:
            raise Refused("invalid", f"the body cannot be read: {error}") from None

    async def _fill(self, body: bytearray, request: web.BaseRequest) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # aiohttp takes it for the start of the response
        while True:
            async with asyncio.timeout(LONGEST_SILENCE):
                piece = await request.content.readany()
            if not piece:
                return
            if len(body) + len(piece) > self._largest:
                raise self._too_large()
            if self._held + len(piece) > AT_ONCE * self._largest:
                raise Refused("busy", "too many bytes of orders are on their way", after=1.0)
            self._held += len(piece)
            body += piece

    def _too_large(self) -> Refused:
        return Refused(
            "too_large",
            f"the body is larger than the {self._largest} bytes that are allowed",
            "large files belong into the suite, on the server's side",
        )
