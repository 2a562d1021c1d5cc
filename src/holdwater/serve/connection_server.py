"""The connections of a server: limits their number, closes dead ones, and reports their problems.

It extends aiohttp's protocol and replaces its error responses. `rollout_server.py` handles the requests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from ..core.serving_protocol import ProblemDetails
from ..gateway.request_heads import MOST_HELD, PARSER_ATTRIBUTE, BoundedParser, HeadTooLarge, HeldHeads
from .bodies import SERVER_HEADERS
from .wire_format import STATUS, WireFormat

IDLE = 60.0  # seconds a connection may stay open without a complete request
LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 64
READ_AHEAD = 64 * 1024  # bytes of a body buffered before they are read
LINGER = 2.0  # seconds to read and discard the rest of a refused body, so that the client reads the response

GONE = 15.0  # seconds without an acknowledgement from the peer before it counts as gone
# With at least so many retransmissions of the same bytes, or window probes, meanwhile.
UNANSWERED_SENDS = 2
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
# Fields of the kernel's `tcp_info`: retransmits, probes, unacked, last_ack_recv.
TCP_INFO = struct.Struct("=2xBB4x16xI28xI")

NOTED_EVERY = 60.0  # seconds
MOST_NOTED = 1000  # pairs of peer and kind that are remembered
_JSON_FORMAT = WireFormat(packed_in=False, packed_out=False, streamed=False)


class PeerWarnings:
    """Reports each kind of problem with a peer at most once a minute."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._noted: dict[tuple[str, str], float] = {}  # bound: MOST_NOTED, the oldest is dropped

    def warn(self, peer: str, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._noted.pop((peer, kind), -NOTED_EVERY) < NOTED_EVERY:
            self._noted[peer, kind] = now
            return
        self._noted[peer, kind] = now
        if len(self._noted) > MOST_NOTED:
            del self._noted[next(iter(self._noted))]
        self._note(f"serve.{kind}", f"{peer}: {_escape_text(message)}")


class ConnectionServer(web.Server):
    """aiohttp's server with a limit on connections and with `_PeerConnection` as their protocol."""

    def __init__(self, handler: Any, most: int, complaints: PeerWarnings) -> None:
        super().__init__(
            handler,
            handler_cancellation=True,
            access_log=None,
            logger=_silent,
            keepalive_timeout=IDLE,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
            read_bufsize=READ_AHEAD,
            lingering_time=LINGER,
            auto_decompress=False,
        )
        self.most = most
        self.warnings = complaints
        self.heads: HeldHeads[_PeerConnection] = HeldHeads(self._close)

    def __call__(self) -> RequestHandler:
        return _PeerConnection(self, loop=self._loop, **self._kwargs)

    def _close(self, guest: _PeerConnection) -> None:
        """Close a connection because the request heads in memory exceed their limit."""
        why = f"a connection was closed: the request heads in memory exceed {MOST_HELD} bytes"
        self.warnings.warn(peer_of(guest.transport), "invalid", why)
        guest.force_close()

    async def patrol(self) -> None:
        """Close the connections of peers that are gone."""
        for guest in self.connections:
            transport = guest.transport
            if transport is not None and _vanished(transport.get_extra_info("socket")):
                transport.abort()


class _PeerConnection(RequestHandler):
    """One connection; sends error responses in the format of the serving protocol."""

    __slots__ = ("_connection_server",)

    def __init__(self, guests: ConnectionServer, **options: Any) -> None:
        super().__init__(guests, **options)
        self._connection_server = guests
        parser = BoundedParser(getattr(self, PARSER_ATTRIBUTE), partial(guests.heads.hold, self))
        setattr(self, PARSER_ATTRIBUTE, parser)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _set_keepalive(transport.get_extra_info("socket"))
        if len(self._connection_server.connections) > self._connection_server.most:
            problem = ProblemDetails(code="busy", message="too many connections", after=1.0)
            self._connection_server.warnings.warn(peer_of(transport), "busy", problem.message)
            assert self.transport is not None
            self.transport.write(_render_raw(problem))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection_server.heads.hold(self, 0)
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        return self._current_request is not None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Handle invalid HTTP and lost connections; the request handler catches all other errors before."""
        if isinstance(exc, ConnectionError):
            raise exc  # aiohttp closes the connection
        told = _escape_text(message or str(exc))
        self._connection_server.warnings.warn(peer_of(request.transport), "invalid", f"not HTTP: {told}")
        response = render_problem(ProblemDetails(code="invalid", message=f"not HTTP: {told}"), _JSON_FORMAT)
        if isinstance(exc, HeadTooLarge):
            response.set_status(exc.code)
        response.force_close()
        return response


def render_problem(problem: ProblemDetails, speech: WireFormat) -> web.Response:
    """Return the response for a refused or failed request."""
    headers = {**SERVER_HEADERS, "Content-Type": speech.content_type}
    if problem.after:
        headers["Retry-After"] = str(max(1, round(problem.after)))
    if problem.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=STATUS.get(problem.code, 500), body=speech.encode(problem), headers=headers)


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Return the name of the peer for reports: its address without the port."""
    name = transport.get_extra_info("peername") if transport is not None else None
    return str(name[0]) if isinstance(name, tuple) else "this machine"


def _escape_text(text: str) -> str:
    """Escape text from a client, so that it cannot break a line of a log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


def _render_raw(problem: ProblemDetails) -> bytes:
    body = _JSON_FORMAT.encode(problem)
    head = (
        f"HTTP/1.1 {STATUS[problem.code]} Too Many Requests\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _set_keepalive(sock: Any) -> None:
    """Make the kernel probe an idle peer."""
    if sock.family == socket.AF_UNIX:
        return
    try:
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        pass  # the peer has closed the connection already; `connection_lost` handles that


def _vanished(sock: Any) -> bool:
    """Return whether a peer no longer acknowledges what we send. A slow reader does acknowledge, and stays.

    `TCP_USER_TIMEOUT` would also drop a client that does not read for a while, such as a trainer in its step.
    """
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    except OSError:
        return True  # the socket is closed
    retransmits, probes, unacked, silent = TCP_INFO.unpack(info)
    in_vain = (unacked > 0 and retransmits >= UNANSWERED_SENDS) or probes >= UNANSWERED_SENDS
    return bool(in_vain and silent >= GONE * 1000)


_silent = logging.Logger("holdwater.serve")  # discards aiohttp's error logs: `handle_error` reports instead
_silent.addHandler(logging.NullHandler())
