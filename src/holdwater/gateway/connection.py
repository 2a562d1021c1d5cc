"""A client's connection: HTTP as providers accept it, and word of every request that cannot be read.

aiohttp refuses a request that repeats a header such as `User-Agent`; providers do not. The head of a refused
request is read again without the repeats; no other request costs anything. What calls are for: `server.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError

from .heads import MOST_HELD, PARSER, BoundedParser, HeadTooLarge, HeldHeads, Parsed
from .open_connections import OpenConnections, Owner
from .routes import CHAT
from .side import refusal

Unread = Callable[[bytes, HttpProcessingError, asyncio.BaseTransport | None], None]
"""Takes the head of a request that cannot be read, what is wrong with it, and its connection."""

# aiohttp allows each of these once.
_SINGLE = frozenset(
    {
        b"content-length",
        b"content-location",
        b"content-range",
        b"content-type",
        b"etag",
        b"host",
        b"max-forwards",
        b"server",
        b"user-agent",
    }
)


class GatewayServer(web.Server):
    """aiohttp's server, with `GatewayConnection`."""

    def __init__(self, handler: Any, unread: Unread, opened: OpenConnections, **options: Any) -> None:
        super().__init__(handler, **options)
        self._unread = unread
        self.opened = opened
        why = f"a connection was closed: more than {MOST_HELD} bytes of heads were held"
        self.heads: HeldHeads[GatewayConnection] = HeldHeads(lambda over: opened.shut(over, 431, why))

    def __call__(self) -> web.RequestHandler:
        return GatewayConnection(self, self._unread, self._loop, self._kwargs)


class GatewayConnection(web.RequestHandler):
    """One connection."""

    def __init__(
        self, manager: GatewayServer, unread: Unread, loop: asyncio.AbstractEventLoop, options: dict[str, Any]
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._heads = manager.heads
        hold = partial(manager.heads.hold, self)
        parser = getattr(self, PARSER)
        setattr(self, PARSER, RequestParser(parser, hold, self._fresh_parser, self._tell_unread))
        self._unread = unread
        self._parser_options = {name: options[name] for name in _PARSER_OPTIONS if name in options}
        self._read_ahead = options["read_bufsize"]
        self._opened = manager.opened
        self.since = 0.0
        self.owner: Owner = ""
        self.calls = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._opened.remove(self)
        self._heads.hold(self, 0)
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        return self._current_request is not None

    def _fresh_parser(self) -> Any:
        options = {**self._parser_options, "payload_exception": web.RequestPayloadError}
        return HttpRequestParser(self, self._loop, self._read_ahead, **options)

    def _tell_unread(self, head: bytes, error: HttpProcessingError) -> None:
        self._unread(head, error, self.transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A request that cannot be read gets an error that clients understand."""
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        status = exc.code if isinstance(exc, HeadTooLarge) else status
        response = refusal(CHAT, status, f"the request cannot be read: {message}")
        response.force_close()
        return response


_PARSER_OPTIONS = ("max_line_size", "max_field_size", "max_headers", "auto_decompress")


class RequestParser(BoundedParser):
    """It takes another parser for a head that has to be read again."""

    def __init__(
        self,
        parser: Any,
        hold: Callable[[int], None],
        fresh: Callable[[], Any],
        unread: Callable[[bytes, HttpProcessingError], None],
    ) -> None:
        super().__init__(parser, hold)
        self._fresh = fresh
        self._unread = unread
        self._head = bytearray()  # of the request that is being read; bound: `LONGEST_HEAD` and a step

    def feed_data(self, data: bytes) -> Parsed:
        try:
            return super().feed_data(data)
        except HttpProcessingError as error:
            self._unread(bytes(self._head), error)
            raise

    def _parse(self, piece: bytes) -> Parsed:
        if self._in_head:
            self._head += piece
        try:
            parsed = super()._parse(piece)
        except HttpProcessingError:
            once = without_repeats(bytes(self._head)) if self._in_head else None
            if once is None:
                raise
            self._head, self._parser = bytearray(once), self._fresh()
            parsed = super()._parse(once)
        if parsed[0]:
            self._head.clear()
        return parsed


def without_repeats(request: bytes) -> bytes | None:
    """A request with the first of each single header; None if it repeats none, or contradicts itself."""
    head, separator, body = request.partition(b"\r\n\r\n")
    seen: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    lines = head.split(b"\r\n")
    unfinished = -1 if separator else len(lines) - 1
    for number, line in enumerate(lines):
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not number or not colon or name not in _SINGLE or number == unfinished:
            kept.append(line)
        elif name not in seen:
            seen[name] = value
            kept.append(line)
        elif name == b"content-length" and value != seen[name]:
            return None
    return b"\r\n".join(kept) + separator + body if len(kept) < len(lines) else None
