"""A client's connection: HTTP as providers accept it, and word of every request that cannot be read.

aiohttp refuses a request that repeats a header such as `User-Agent`; providers do not. The head of a refused
request is read again without the repeats; no other request costs anything. What calls are for: `server.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError

from .routes import CHAT
from .side import refusal

Unread = Callable[[bytes, str, asyncio.BaseTransport | None], None]
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
_PARSER = "_request_parser" if "_request_parser" in web.RequestHandler.__slots__ else "_parser"


class GatewayServer(web.Server):
    """aiohttp's server, with `GatewayConnection`."""

    def __init__(self, handler: Any, unread: Unread, **options: Any) -> None:
        super().__init__(handler, **options)
        self._unread = unread

    def __call__(self) -> web.RequestHandler:
        return GatewayConnection(self, self._unread, self._loop, self._kwargs)


class GatewayConnection(web.RequestHandler):
    """One connection."""

    def __init__(
        self, manager: web.Server, unread: Unread, loop: asyncio.AbstractEventLoop, options: dict[str, Any]
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        parser = getattr(self, _PARSER)
        setattr(self, _PARSER, RequestParser(parser, self._fresh_parser, self._tell_unread))
        self._unread = unread
        self._parser_options = {name: options[name] for name in _PARSER_OPTIONS if name in options}
        self._read_ahead = options["read_bufsize"]

    def _fresh_parser(self) -> Any:
        options = {**self._parser_options, "payload_exception": web.RequestPayloadError}
        return HttpRequestParser(self, self._loop, self._read_ahead, **options)

    def _tell_unread(self, head: bytes, message: str) -> None:
        self._unread(head, message, self.transport)

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
        response = refusal(CHAT, status, f"the request cannot be read: {message}")
        response.force_close()
        return response


_PARSER_OPTIONS = ("max_line_size", "max_field_size", "max_headers", "auto_decompress")


class RequestParser:
    """aiohttp's parser for one connection; it takes another one for a head that has to be read again."""

    def __init__(self, parser: Any, fresh: Callable[[], Any], unread: Callable[[bytes, str], None]) -> None:
        self._parser = parser
        self._fresh = fresh
        self._unread = unread
        self._head = b""  # of the request that is being read; bound: what the parser takes as a head
        self._payload: StreamReader | None = None  # of the request before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> tuple[Sequence[Any], bool, bytes]:
        """The messages whose heads `data` completes."""
        in_head = self._payload is None or self._payload.is_eof()
        if in_head:
            self._head += data
        try:
            messages, upgraded, tail = self._parser.feed_data(data)
        except HttpProcessingError as error:
            if not in_head:
                self._unread(b"", error.message)
                raise
            messages, upgraded, tail = self._read_again(error)
        if messages:
            self._payload, self._head = messages[-1][1], b""
        return messages, upgraded, tail

    def _read_again(self, error: HttpProcessingError) -> tuple[Sequence[Any], bool, bytes]:
        """The head without the headers that it repeats; raises `error` if there are none."""
        once = without_repeats(self._head)
        if once is None:
            self._unread(self._head, error.message)
            raise error
        self._head, self._parser = once, self._fresh()
        try:
            result: tuple[Sequence[Any], bool, bytes] = self._parser.feed_data(once)
            return result
        except HttpProcessingError as worse:
            self._unread(self._head, worse.message)
            raise


def without_repeats(request: bytes) -> bytes | None:
    """A request with the first of each single header; None if it repeats none, or contradicts itself."""
    head, separator, body = request.partition(b"\r\n\r\n")
    seen: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    for number, line in enumerate(lines := head.split(b"\r\n")):
        name, colon, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if not number or not colon or name not in _SINGLE:
            kept.append(line)
        elif name not in seen:
            seen[name] = value
            kept.append(line)
        elif name == b"content-length" and value != seen[name]:
            return None
    return b"\r\n".join(kept) + separator + body if len(kept) < len(lines) else None
