"""Client connections: HTTP as leniently as providers accept it, a bound on open connections, and refusals.

aiohttp refuses a request that repeats a header such as `User-Agent`; providers do not. The head of a refused
request is parsed again without the repeats; other requests cost nothing extra. `server.py` handles the calls.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpRequestParser
from aiohttp.http_exceptions import HttpProcessingError

from ..dialect import CHAT
from .request_heads import MOST_HELD, PARSER_ATTRIBUTE, BoundedParser, HeadTooLarge, HeldHeads, ParsedMessages
from .routes import make_refusal

MOST_KINDS = 32  # reported per attempt
LONGEST_REPORT = 500  # characters
REPORTED_COUNTS = frozenset(10**power for power in range(1, 10))  # counts reported while the attempt runs
STRANGER_SECONDS = 30.0  # until the first request with a valid key
MOST_EACH = 1024  # per attempt, or per process or address without a valid key
SHARE, SHARE_EACH = 2, 8  # parts of the process's file limit: for all, and for each
LEAST, LEAST_EACH = 64, 16
_CREDENTIALS = struct.Struct("3i")  # process, user and group
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
_PARSER_OPTIONS = ("max_line_size", "max_field_size", "max_headers", "auto_decompress")


class RefusedCalls:
    """The refused requests of one session, or of all requests without a session."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._counts: dict[str, int] = {}  # bound: MOST_KINDS
        self._others = 0

    def add(self, call: str, status: int, message: str) -> None:
        """Count a call, such as `POST v1/messages`, that was refused with this status."""
        what = f"{status} `{call}`: {message}"[:LONGEST_REPORT]
        if what in self._counts:
            self._counts[what] += 1
            if self._counts[what] in REPORTED_COUNTS:  # the final report may be lost with its worker
                self._tell(f"{self._counts[what]} times: {what}")
        elif len(self._counts) < MOST_KINDS:
            self._counts[what] = 1
            self._tell(what)
        else:
            self._others += 1

    def close(self) -> None:
        """Report the count of each kind that occurred more than once."""
        for what, count in self._counts.items():
            if count > 1:
                self._tell(f"{count} times: {what}")
        if self._others:
            self._tell(f"{self._others} more requests were refused")
        self._counts, self._others = {}, 0


ConnectionOwner = int | str
"""An attempt's id, or the name of a stranger's process or address."""


OnClosed = Callable[["GatewayConnection", int, str], None]
"""Takes a connection that is about to be closed, the status, and the reason."""


class OpenConnections:
    """The open connections. `files`: the process's limit on open files."""

    def __init__(self, files: int, on_closed: OnClosed) -> None:
        self.most = max(LEAST, files // SHARE)
        self.most_each = max(LEAST_EACH, min(MOST_EACH, files // SHARE_EACH))
        self.patience = STRANGER_SECONDS
        self._on_closed = on_closed
        # In order of arrival; bound: `most`.
        self._by_owner: dict[ConnectionOwner, dict[GatewayConnection, None]] = {}
        self._strangers: dict[GatewayConnection, None] = {}
        self.count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: GatewayConnection) -> None:
        """Add a new connection, as a stranger's."""
        connection.since = asyncio.get_running_loop().time()
        origin = connection.origin
        connection.owner = name_peer(connection.transport) if origin is None else f"sandbox {origin}"
        self._strangers[connection] = None
        self.count += 1
        self._put(connection)
        if self.count > self.most:
            self._shed(self._strangers, self.most)
        if self._timer is None:
            self._start_timer(connection)

    def claim(self, connection: GatewayConnection, attempt: int) -> None:
        """Assign the connection to `attempt`, whose key a request on it carried."""
        if connection.owner == attempt:
            return
        self._take(connection)
        connection.owner = attempt
        self._put(connection)

    def remove(self, connection: GatewayConnection) -> None:
        """Remove a closed connection."""
        if connection in self._by_owner.get(connection.owner, ()):
            self._take(connection)
            self.count -= 1

    def shut(self, connection: GatewayConnection, status: int, why: str) -> None:
        """Close the connection and report the reason."""
        self.remove(connection)
        self._on_closed(connection, status, why)
        connection.force_close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _put(self, connection: GatewayConnection) -> None:
        group = self._by_owner.setdefault(connection.owner, {})
        group[connection] = None
        if len(group) > self.most_each:
            self._shed(group, self.most_each)

    def _take(self, connection: GatewayConnection) -> None:
        self._strangers.pop(connection, None)
        group = self._by_owner[connection.owner]
        del group[connection]
        if not group:
            del self._by_owner[connection.owner]

    def _shed(self, group: dict[GatewayConnection, None], most: int) -> None:
        """Close the oldest connection without calls in flight, or else the newest one."""
        idle = next((connection for connection in group if not connection.calls), None)
        connection = next(reversed(group)) if idle is None else idle
        self.shut(connection, 503, f"connection closed: more than {most} are open")

    def _start_timer(self, oldest: GatewayConnection) -> None:
        self._timer = asyncio.get_running_loop().call_at(oldest.since + self.patience, self._close_strangers)

    def _close_strangers(self) -> None:
        """Close the strangers' connections whose time is up."""
        self._timer = None
        over = asyncio.get_running_loop().time() - self.patience
        while (oldest := next(iter(self._strangers), None)) is not None:
            if oldest.since > over:
                return self._start_timer(oldest)
            self.shut(oldest, 408, f"no request with a valid key within {self.patience:g} s")
        return None


def name_peer(transport: asyncio.BaseTransport | None) -> str:
    """Return a name for the other end of a connection: its process, or its address."""
    if (process := find_peer_process(transport)) is not None:
        return f"process {process}"
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"address {peer[0]}" if isinstance(peer, tuple) else "unknown"


def find_origin(transport: asyncio.BaseTransport | None) -> int | None:
    """Return the attempt on whose listening socket the connection was accepted."""
    protocol = transport.get_protocol() if transport is not None else None
    return protocol.origin if isinstance(protocol, GatewayConnection) else None


def find_peer_process(transport: asyncio.BaseTransport | None) -> int | None:
    """Return the id of the process at the other end of a unix socket."""
    socket = transport.get_extra_info("socket") if transport is not None else None
    if socket is None or socket.family != sockets.AF_UNIX:
        return None
    try:
        content = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None  # the peer is gone
    process: int = _CREDENTIALS.unpack(content)[0]
    return process


OnUnreadable = Callable[[bytes, HttpProcessingError, asyncio.BaseTransport | None], None]
"""Takes the head of an unreadable request, the parser's error, and the connection."""


class GatewayServer(web.Server):
    """aiohttp's server, with `GatewayConnection` for each connection."""

    def __init__(self, handler: Any, unread: OnUnreadable, opened: OpenConnections, **options: Any) -> None:
        super().__init__(handler, **options)
        self._unread = unread
        self.open_connections = opened
        why = f"connection closed: request heads of all connections exceed {MOST_HELD} bytes"
        self.heads: HeldHeads[GatewayConnection] = HeldHeads(lambda over: opened.shut(over, 431, why))

    def __call__(self) -> GatewayConnection:
        return GatewayConnection(self, self._unread, self._loop, self._kwargs)

    def accept_from(self, attempt: int) -> GatewayConnection:
        """Return the protocol for a connection that only this attempt can have opened."""
        connection = self()
        connection.origin = attempt
        return connection


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
        self.since = 0.0  # by the loop's clock
        self.owner: ConnectionOwner = ""
        self.origin: int | None = None  # the attempt whose listening socket accepted it
        self.calls = 0  # in flight

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
