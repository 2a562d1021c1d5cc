"""The HTTP part of the sandbox server: health, and the links of its clients, which a token protects.

A client whose connection is cut has a grace period to come back. Then its session ends, with all its
sandboxes.
`client_session.py` has the sessions.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

import msgspec
from aiohttp import WSCloseCode, web

from ...core.errors import BadInput, HoldwaterError, RequestRefused
from ...core.sandbox_protocol import (
    GATEWAY_HEADER,
    HEALTH_PATH,
    LINK_PATH,
    LONGEST_SESSION,
    RECEIVED_HEADER,
    SESSION_HEADER,
    SandboxServerHealth,
)
from ...sandbox.remote.connection import DRAINING, SESSION_GONE
from ...version import __version__
from ...web.message_link import HEARTBEAT, LARGEST_MESSAGE, SESSION_OVER, LinkBroken
from ..connection_server import PeerWarnings, peer_of
from ..settings import ListenAddress, ServerSettings, make_rules, make_tls_context, resolve_address
from ..wire_format import STATUS
from .client_session import ClientSession, PlaceBook
from .sandbox_host import SandboxHost

CLOSING = 0.5  # seconds to finish responses when the server closes
BACKLOG = 1024  # connections waiting to be accepted
MOST_SESSIONS = 4096
SESSION_NAME = re.compile(rf"[0-9a-f]{{16,{LONGEST_SESSION}}}")


class SessionLife:
    """A session and the connection under it, if there is one at present."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.socket: web.WebSocketResponse | None = None
        self.transport: asyncio.Transport | None = None
        self.stack = AsyncExitStack()
        self.timer: asyncio.TimerHandle | None = None  # runs while there is no connection


class SandboxServer:
    """`async with SandboxServer(host, settings, directory, grace) as server` listens on `server.address`."""

    def __init__(self, host: SandboxHost, settings: ServerSettings, directory: Path, grace: float) -> None:
        self.address = ""
        self.over = asyncio.Event()  # nothing more will be served
        self._host = host
        self._settings = settings
        self._directory = directory  # for the sockets of gateways: their paths must be short
        self._grace = grace
        self._listen_address = resolve_address(settings)
        self._tls = make_tls_context(settings)
        self._rules = make_rules(settings, self._listen_address)
        self._warnings = PeerWarnings(settings.note)
        self._book = PlaceBook(host)
        self._lives: dict[str, SessionLife] = {}  # bound: MOST_SESSIONS
        self._count = 0
        self._endings: set[asyncio.Task[None]] = set()  # bound: MOST_SESSIONS
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            app = web.Application()
            app.router.add_get(HEALTH_PATH, self._health)
            app.router.add_get(LINK_PATH, self._link)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.push_async_callback(self._end_sessions)
            self.address = await self._listen(runner, self._listen_address)
            self._host.on_failure = self.over.set
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def drain(self) -> None:
        """Give no more places; the server is over when the last one is given back, or by `leave`."""
        self._book.draining = True
        self._book.on_empty = self.over.set
        if not len(self._book):
            self.over.set()

    def leave(self) -> None:
        """End now."""
        self._book.draining = True
        self.over.set()

    @property
    def sandboxes(self) -> int:
        return len(self._book)

    async def _listen(self, runner: web.AppRunner, place: ListenAddress) -> str:
        if place.path is not None:
            raise BadInput(f"`--listen` must look like `127.0.0.1:8500`: `{self._settings.listen}`")
        site = web.TCPSite(runner, place.host, place.port, ssl_context=self._tls, backlog=BACKLOG)
        try:
            await site.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise BadInput(f"cannot listen on `{self._settings.listen}`: {reason}") from None
        scheme, host = "http" if self._tls is None else "https", place.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refuse(request)) is not None:
            return refused
        memory, disk = self._host.room
        health = SandboxServerHealth(
            version=__version__,
            sandbox=self._host.config.sandbox,
            network=self._host.config.network,
            draining=self._book.draining,
            sessions=len(self._lives),
            sandboxes=len(self._book),
            waiting=self._host.waiting,
            memory=self._host.leased,
            memory_room=memory,
            disk_room=disk,
        )
        return web.Response(body=msgspec.json.encode(health), content_type="application/json")

    async def _link(self, request: web.Request) -> web.StreamResponse:
        """Serve a connection of a session until it ends."""
        if (refused := self._refuse(request)) is not None:
            return refused
        name, received = request.headers.get(SESSION_HEADER, ""), request.headers.get(RECEIVED_HEADER)
        if not SESSION_NAME.fullmatch(name) or (received is not None and not received.isdecimal()):
            return web.Response(status=400, text="invalid session")
        life = self._lives.get(name)
        if life is None and received is not None:
            return web.Response(status=SESSION_GONE, text="no such session")
        if life is None:
            if self._book.draining or len(self._lives) >= MOST_SESSIONS:
                return web.Response(status=DRAINING, text="no new sessions")
            try:
                life = await self._begin(name, reaches_gateway=request.headers.get(GATEWAY_HEADER) == "1")
            except (HoldwaterError, OSError) as error:
                self._settings.note("session.failed", str(error))
                return web.Response(status=DRAINING, text="no new sessions")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=LARGEST_MESSAGE, compress=False)
        await self._serve(life, request, socket, int(received or 0))
        return socket

    def _refuse(self, request: web.Request) -> web.Response | None:
        """Return the response to a request that the rules refuse."""
        try:
            self._rules.admit(request.headers)
        except RequestRefused as error:
            self._warnings.warn(peer_of(request.transport), error.code, error.message)
            return web.Response(status=STATUS.get(error.code, 400), text=f"{error.message}; {error.hint}")
        return None

    async def _begin(self, name: str, *, reaches_gateway: bool) -> SessionLife:
        self._count += 1
        session = ClientSession(name, self._book, self._directory / str(self._count), self._grace)
        life = SessionLife(session)
        await life.stack.enter_async_context(session.open(reaches_gateway=reaches_gateway))
        self._lives[name] = life
        return life

    async def _serve(
        self, life: SessionLife, request: web.Request, socket: web.WebSocketResponse, received: int
    ) -> None:
        """Exchange messages over this connection, which replaces an older one of the session."""
        if life.timer is not None:
            life.timer.cancel()
        if life.transport is not None:
            life.transport.abort()
        life.socket, life.transport = socket, request.transport
        streams = life.session.streams
        over = False
        try:
            await socket.prepare(request)
            await streams.link.serve(socket, received)
            over = socket.close_code == SESSION_OVER
        except LinkBroken as error:
            over = True
            self._settings.note("session.broken", error.message)
        except ConnectionError:
            pass  # cut at once
        finally:
            if life.socket is socket:
                life.socket = life.transport = None
                loop, grace = asyncio.get_running_loop(), 0.0 if over else self._grace
                life.timer = loop.call_later(grace, self._start_ending, life)

    def _start_ending(self, life: SessionLife) -> None:
        """End a session whose client is gone."""
        self._lives.pop(life.session.name, None)
        task = asyncio.ensure_future(life.stack.aclose())
        self._endings.add(task)
        task.add_done_callback(self._on_ended)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._settings.note("session.failed", f"{type(error).__name__}: {error}")

    async def _end_sessions(self) -> None:
        """End all sessions: their clients find another server, or wait for the next one here."""
        for life in list(self._lives.values()):
            if life.timer is not None:
                life.timer.cancel()
            self._start_ending(life)
            if life.socket is not None:
                await life.socket.close(code=WSCloseCode.GOING_AWAY)
        if self._endings:
            await asyncio.wait(self._endings)
