"""A client's connection: HTTP as leniently as providers accept it, with a report of each unreadable request.

aiohttp refuses a request that repeats a header such as `User-Agent`; providers do not. The head of a refused
request is parsed again without the repeats; other requests cost nothing extra. `server.py` handles the calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError

from ..dialect import CHAT
from .open_connections import ConnectionOwner, OpenConnections
from .request_heads import MOST_HELD, PARSER_ATTRIBUTE, BoundedParser, HeadTooLarge, HeldHeads, ParsedMessages
from .routes import make_refusal

OnUnreadable = Callable[[bytes, HttpProcessingError, asyncio.BaseTransport | None], None]
"""Takes the head of an unreadable request, the parser's error, and the connection."""

# aiohttp allows each of these once.
_SINGLE_HEADERS = frozenset(
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
    """aiohttp's server, with `GatewayConnection` for each connection."""

    def __init__(self, handler: Any, unread: OnUnreadable, opened: OpenConnections, **options: Any) -> None:
        super().__init__(handler, **options)
        self._unread = unread
        self.open_connections = opened
        why = f"connection closed: request heads of all connections exceed {MOST_HELD} bytes"
        self.heads: HeldHeads[GatewayConnection] = HeldHeads(lambda over: opened.shut(over, 431, why))

    def __call__(self) -> web.RequestHandler:
        return GatewayConnection(self, self._unread, self._loop, self._kwargs)


class GatewayConnection(web.RequestHandler):
    """One client connection."""

    def __init__(
        self,
        manager: GatewayServer,
        unread: OnUnreadable,
        loop: asyncio.AbstractEventLoop,
        options: dict[str, Any],
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._heads = manager.heads
        hold = partial(manager.heads.hold, self)
        parser = getattr(self, PARSER_ATTRIBUTE)
        setattr(self, PARSER_ATTRIBUTE, RequestParser(parser, hold, self._make_parser, self._report_unread))
        self._unread = unread
        self._parser_options = {name: options[name] for name in _PARSER_OPTIONS if name in options}
        self._read_ahead = options["read_bufsize"]
        self._open_connections = manager.open_connections
        self.since = 0.0
        self.owner: ConnectionOwner = ""
        self.calls = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._open_connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open_connections.remove(self)
        self._heads.hold(self, 0)
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        return self._current_request is not None

    def _make_parser(self) -> Any:
        options = {**self._parser_options, "payload_exception": web.RequestPayloadError}
        return HttpRequestParser(self, self._loop, self._read_ahead, **options)

    def _report_unread(self, head: bytes, error: HttpProcessingError) -> None:
        self._unread(head, error, self.transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return an error that clients understand for a request that cannot be read."""
        if status != 400 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        status = exc.code if isinstance(exc, HeadTooLarge) else status
        response = make_refusal(CHAT, status, f"the request cannot be read: {message}")
        response.force_close()
        return response


_PARSER_OPTIONS = ("max_line_size", "max_field_size", "max_headers", "auto_decompress")


class RequestParser(BoundedParser):
    """A bounded parser that uses a fresh aiohttp parser for a head that must be parsed again."""

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
        self._head = bytearray()  # of the current request; bound: `LONGEST_HEAD` and one `STEP`

    def feed_data(self, data: bytes) -> ParsedMessages:
        try:
            return super().feed_data(data)
        except HttpProcessingError as error:
            self._unread(bytes(self._head), error)
            raise

    def _parse(self, piece: bytes) -> ParsedMessages:
        if self._in_head:
            self._head += piece
        try:
            parsed = super()._parse(piece)
        except HttpProcessingError:
            once = drop_repeats(bytes(self._head)) if self._in_head else None
            if once is None:
                raise
            self._head, self._parser = bytearray(once), self._fresh()
            parsed = super()._parse(once)
        if parsed[0]:
            self._head.clear()
        return parsed


def drop_repeats(request: bytes) -> bytes | None:
    """Return `request` with the first of each single header; None if none repeats, or if lengths conflict."""
    head, separator, body = request.partition(b"\r\n\r\n")
    seen: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    lines = head.split(b"\r\n")
    unfinished = -1 if separator else len(lines) - 1
    for number, line in enumerate(lines):
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not number or not colon or name not in _SINGLE_HEADERS or number == unfinished:
            kept.append(line)
        elif name not in seen:
            seen[name] = value
            kept.append(line)
        elif name == b"content-length" and value != seen[name]:
            return None
    return b"\r\n".join(kept) + separator + body if len(kept) < len(lines) else None
