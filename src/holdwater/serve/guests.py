"""The connections of a door: how many there are, whether somebody is still there, and what is noted of them.

What they ask for is `door.py`'s. Below it is aiohttp's own protocol, whose errors are put into our words.
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

from ..core.serving import Problem
from ..gateway.heads import MOST_HELD, PARSER, BoundedParser, HeadTooLarge, HeldHeads
from .speech import STATUS, Speech
from .written import SERVER

IDLE = 60.0  # seconds that a connection may be without a whole request
LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 64
READ_AHEAD = 64 * 1024  # bytes of a body that wait to be read
LINGER = 2.0  # seconds in which the rest of a refused body is thrown away, so that the answer is read

GONE = 15.0  # seconds without an answer from the other machine
IN_VAIN = 2  # times at least that the same bytes were sent, or that it was asked whether it can read again
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 3}
# Of the kernel's `tcp_info`: retransmits, probes, unacked, last_ack_recv.
TCP_INFO = struct.Struct("=2xBB4x16xI28xI")

NOTED_EVERY = 60.0  # seconds
MOST_NOTED = 1000  # kinds and peers that are remembered
_JSON = Speech(packed_in=False, packed_out=False, streamed=False)


class Complaints:
    """Tells of each kind of trouble with a peer once a minute."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._noted: dict[tuple[str, str], float] = {}  # bound: MOST_NOTED, the oldest goes

    def tell(self, peer: str, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._noted.pop((peer, kind), -NOTED_EVERY) < NOTED_EVERY:
            self._noted[peer, kind] = now
            return
        self._noted[peer, kind] = now
        if len(self._noted) > MOST_NOTED:
            del self._noted[next(iter(self._noted))]
        self._note(f"serve.{kind}", f"{peer}: {_printable(message)}")


class Guests(web.Server):
    """aiohttp's server, with a bound on connections, and ours as their protocol."""

    def __init__(self, handler: Any, most: int, complaints: Complaints) -> None:
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
        self.complaints = complaints
        self.heads: HeldHeads[_Guest] = HeldHeads(self._close)

    def __call__(self) -> RequestHandler:
        return _Guest(self, loop=self._loop, **self._kwargs)

    def _close(self, guest: _Guest) -> None:
        """Close a connection for its head."""
        why = f"a connection was closed: more than {MOST_HELD} bytes of heads were held"
        self.complaints.tell(peer_of(guest.transport), "invalid", why)
        guest.force_close()

    async def patrol(self) -> None:
        """Close the connections of machines that are gone."""
        for guest in self.connections:
            transport = guest.transport
            if transport is not None and _vanished(transport.get_extra_info("socket")):
                transport.abort()


class _Guest(RequestHandler):
    """One connection."""

    __slots__ = ("_guests",)

    def __init__(self, guests: Guests, **options: Any) -> None:
        super().__init__(guests, **options)
        self._guests = guests
        parser = BoundedParser(getattr(self, PARSER), partial(guests.heads.hold, self))
        setattr(self, PARSER, parser)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _watch(transport.get_extra_info("socket"))
        if len(self._guests.connections) > self._guests.most:
            problem = Problem(code="busy", message="too many connections", after=1.0)
            self._guests.complaints.tell(peer_of(transport), "busy", problem.message)
            assert self.transport is not None
            self.transport.write(_raw(problem))
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._guests.heads.hold(self, 0)
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
        """What is no HTTP, and connections that are lost; all else is dealt with before it gets here."""
        if isinstance(exc, ConnectionError):
            raise exc  # aiohttp hangs up on this
        told = _printable(message or str(exc))
        self._guests.complaints.tell(peer_of(request.transport), "invalid", f"not HTTP: {told}")
        response = refusal(Problem(code="invalid", message=f"not HTTP: {told}"), _JSON)
        if isinstance(exc, HeadTooLarge):
            response.set_status(exc.code)
        response.force_close()
        return response


def refusal(problem: Problem, speech: Speech) -> web.Response:
    """The answer to whoever does not get what he asked for."""
    headers = {**SERVER, "Content-Type": speech.kind}
    if problem.after:
        headers["Retry-After"] = str(max(1, round(problem.after)))
    if problem.code == "unauthorized":
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=STATUS.get(problem.code, 500), body=speech.encode(problem), headers=headers)


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Whom to name: the other machine, not its ports."""
    name = transport.get_extra_info("peername") if transport is not None else None
    return str(name[0]) if isinstance(name, tuple) else "this machine"


def _printable(text: str) -> str:
    """What a client sent is data: it cannot break a line of a log."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:300])


def _raw(problem: Problem) -> bytes:
    body = _JSON.encode(problem)
    head = (
        f"HTTP/1.1 {STATUS[problem.code]} Too Many Requests\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def _watch(sock: Any) -> None:
    """Have the kernel ask after a machine that we wait for."""
    if sock.family == socket.AF_UNIX:
        return
    try:
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    except OSError:
        pass  # it hung up already, and that is heard in its place


def _vanished(sock: Any) -> bool:
    """Whether a machine that we send to does not answer. One that reads slowly does: it has time.

    `TCP_USER_TIMEOUT` would take a client for gone that does not read for a while, as a trainer in its step.
    """
    if sock.family == socket.AF_UNIX:
        return False
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
    except OSError:
        return True  # it is closed
    retransmits, probes, unacked, silent = TCP_INFO.unpack(info)
    in_vain = (unacked > 0 and retransmits >= IN_VAIN) or probes >= IN_VAIN
    return bool(in_vain and silent >= GONE * 1000)


_silent = logging.Logger("holdwater.serve")  # aiohttp's own words about errors: ours are in `handle_error`
_silent.addHandler(logging.NullHandler())
