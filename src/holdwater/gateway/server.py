"""The gateway's listener: finds the session of each call by its key and refuses calls without a valid one.

It listens on a unix socket (for sandboxes), on 127.0.0.1 (for code in the worker), and on the address of a
container network if there is one. `relay.py` handles each call; `sessions.py` holds an attempt's state.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket as sockets
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.errors import AttemptOver, BadInput, LimitReached, RunFailed
from ..core.exchange import ExchangeLog, ReplyRecording
from ..core.records import Limits, MiB
from ..core.sandbox_kind import CONTAINER_PORTS
from ..dialect import CHAT, DIALECTS
from ..dialect.interface import Dialect
from .body import ByteAdmission
from .body_reader import UnreadableBody
from .call_terms import NO_PRICES, CallTerms, JudgeRoute, ModelRoute, RateLimiter, SharedResources
from .connections import (
    GatewayConnection,
    GatewayServer,
    OpenConnections,
    RefusedCalls,
    find_origin,
    find_peer_process,
)
from .in_process_calls import IncomingRequest, InProcessRequest
from .json_checks import OverfullRequest
from .relay import KEEP_ALIVE, CallRelay, UnsupportedDialect
from .request_parser import MalformedRequest
from .routes import CHAT_ROUTE, SERVER_HEADER, CallRoute, RouteKind, find_route, list_models, make_refusal
from .sessions import RecordFailed, Session
from .upstreams import Upstream

LONGEST_SOCKET_PATH = 107  # bytes, the kernel's limit
LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 512
READ_AHEAD = 64 * 1024  # bytes of a body read before it is admitted: half of a connection's buffer
IDLE_SECONDS = 3600.0  # seconds that an idle connection stays open
KEYLESS = "no attempt is running with this key"
CLOSING = 1.0  # seconds for responses to finish when the gateway closes


def _ignore_event(what: str, attempt: int | None = None) -> None:
    """Ignore a failed clean-up or a refused request: the default."""


def _ignore_process(process: int) -> None:
    """Return no attempt for a process: the default."""


class Gateway:
    """One worker's listener: `async with Gateway(upstream, socket) as gateway`."""

    def __init__(
        self,
        upstream: Upstream,
        socket: Path,
        *,
        model: str | None = None,
        admitted_bytes: int = 16 * MiB,
        body_cap: int = 256 * MiB,
        keep_alive: float = KEEP_ALIVE,
        terms: CallTerms = CallTerms(),  # noqa: B008 (a frozen record)
    ) -> None:
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise BadInput(f"socket path longer than {LONGEST_SOCKET_PATH} bytes: `{socket}`")
        self.socket = socket
        self.url = ""
        self.outside_url = ""  # for containers
        self.sessions: dict[str, Session] = {}  # by key; an entry lives as long as its scope
        own = ModelRoute(upstream, model, terms.sampling, names=terms.names)
        self.relay = CallRelay(own, ByteAdmission(admitted_bytes), body_cap, keep_alive)
        self.calls = 0  # received so far
        self.serving = 0  # calls in flight
        self._terms = terms
        self.on_failed_cleanup: Callable[[str], None] = _ignore_event
        self.on_refused: Callable[[str, int | None], None] = _ignore_event  # with the attempt, if known
        self.attempt_of: Callable[[int], int | None] = _ignore_process  # by process id
        self._refusals = RefusedCalls(lambda what: self.on_refused(what, None))
        self._attempt_refusals: dict[
            int, RefusedCalls
        ] = {}  # by attempt; an entry lives as long as its session
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-media")
        self._unheld = asyncio.Event()  # not set: the run is paused
        self._unheld.set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.executor.shutdown, wait=False)
            stack.callback(self._refusals.close)
            self.connections = OpenConnections(_most_files(), self._on_closed)
            stack.callback(self.connections.close)
            server = GatewayServer(
                self._handle,
                self._on_unread,
                self.connections,
                handler_cancellation=True,
                access_log=None,
                keepalive_timeout=IDLE_SECONDS,
                max_line_size=LONGEST_HEADER,
                max_field_size=LONGEST_HEADER,
                max_headers=MOST_HEADERS,
                read_bufsize=READ_AHEAD,
                auto_decompress=False,
            )
            self._listening = server
            runner = web.ServerRunner(server, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.callback(self.socket.unlink, missing_ok=True)
            await web.SockSite(runner, _bind_unix_socket(self.socket), backlog=1024).start()
            tcp = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await tcp.start()
            self.url = f"http://127.0.0.1:{runner.addresses[-1][1]}/v1"
            self._runner = runner
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def route_of(self, key: str) -> ModelRoute:
        """Return the route of the session with this key."""
        session = self.sessions.get(key)
        return self.relay.default_route if session is None else self.relay.resolve_model_route(session)

    def steer(self, own: ModelRoute) -> None:
        """Set the default route, for all sessions without an upstream of their own.

        Calls in flight keep their route.
        """
        self.relay.default_route = own

    def hold_calls(self, *, held: bool) -> None:
        """Hold calls that come from now on, or let them go. Calls in flight finish."""
        (self._unheld.clear if held else self._unheld.set)()

    def change_rate(self, rate: RateLimiter | None) -> None:
        """Pace the calls of the run's own model by this rate, also in open sessions."""
        self._terms = self._terms._replace(rate=rate)
        for session in self.sessions.values():
            if session.model_route is None or session.model_route.upstream is None:
                session.terms = session.terms._replace(rate=rate)

    async def listen_on(self, address: str) -> None:
        """Listen on one of our ports on the container network: the firewall there allows these."""
        for port in CONTAINER_PORTS:
            try:
                await web.TCPSite(self._runner, address, port, backlog=1024).start()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise RunFailed(
                    f"cannot listen for containers: `{address}`: {error.strerror}",
                    "the container network is not on this machine: run holdwater on the docker daemon's host",
                    kind="gateway",
                ) from error
            self.outside_url = f"http://{address}:{port}/v1"
            return
        raise RunFailed(f"no free port for containers: `{address}`", kind="gateway")

    async def serve_listener(self, listener: sockets.socket, attempt: int) -> Callable[[], None]:
        """Serve calls on a socket that only `attempt` reaches; return a function that closes it."""
        loop = asyncio.get_running_loop()
        accept = partial(self._listening.accept_from, attempt)
        server = await loop.create_server(accept, sock=listener, backlog=1024)
        return server.close

    @asynccontextmanager
    async def open_session(
        self,
        attempt: int,
        log: ExchangeLog,
        limits: Limits = Limits(),  # noqa: B008 (a frozen record)
        recording: ReplyRecording | None = None,
        behind: ModelRoute | None = None,
    ) -> AsyncIterator[Session]:
        """Open a session for `attempt`, whose exchanges go to `log`. Its key is valid only in this scope.

        Requests that `recording` has are answered from it, all others by the route `behind`.
        """
        terms = self._terms
        if behind is not None and behind.upstream is not None:  # price and rate apply only to the run's model
            terms = terms._replace(price=None, mapped_prices=NO_PRICES, rate=None, shared=False)
        shared = SharedResources(self.executor, self.relay.admission)
        session = Session(attempt, log, shared, limits, terms, recording, behind)
        self._attempt_refusals[attempt] = RefusedCalls(lambda what: self.on_refused(what, attempt))
        try:
            async with self._register_session(session):
                yield session
        finally:
            self._attempt_refusals.pop(attempt).close()

    @asynccontextmanager
    async def lend(
        self, session: Session, by: str, *, limited: bool = True, judge: JudgeRoute | None = None
    ) -> AsyncIterator[Session]:
        """Open a session with its own key for the borrower `by`: see `Session.lend`."""
        with session.lend(by, limited=limited, judge=judge) as borrower:
            async with self._register_session(borrower):
                yield borrower

    @asynccontextmanager
    async def _register_session(self, session: Session) -> AsyncIterator[None]:
        self.sessions[session.key] = session
        try:
            yield
        finally:
            del self.sessions[session.key]
            if not await session.close():
                self.on_failed_cleanup(f"calls of attempt {session.attempt} did not end when it closed")

    async def ask(self, key: str, near: InProcessRequest) -> tuple[int, bytes]:
        """Make a Chat Completions call from this process; return the status and body of the response."""
        await asyncio.sleep(0)  # an immediate answer would never let other tasks run
        response = await self._answer_in_process(near, key)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        return response.status, response.body

    async def _answer_in_process(self, near: InProcessRequest, key: str) -> web.StreamResponse:
        if (session := self.sessions.get(key)) is None:
            return _refuse_keyless(CHAT)
        try:
            return await self._call(near, session, CHAT_ROUTE)
        except Exception as error:  # boundary: else the agent would be blamed for our error  # noqa: BLE001
            return make_refusal(CHAT, 500, f"internal error: {type(error).__name__}: {error}", "internal")

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = find_route(request)
        if asked.kind is RouteKind.ROOT:
            return web.Response(headers=SERVER_HEADER)
        # A client with a key in its path may send another one: the first valid key counts.
        keys = (key for key in _list_keys(request, asked) if key in self.sessions)
        session = self.sessions.get(next(keys, ""))
        if session is None:
            self._find_refusals(request.transport).add(_name_call(request, asked), 401, KEYLESS)
            return _refuse_keyless(asked.dialect)
        connection = request.protocol
        assert isinstance(connection, GatewayConnection)
        self.connections.claim(connection, session.attempt)
        if asked.kind in (RouteKind.TURN, RouteKind.COUNT):
            connection.calls += 1
            try:
                return await self._call(request, session, asked)
            finally:
                connection.calls -= 1
        if asked.kind is RouteKind.MODELS:
            return list_models(asked.dialect, asked.model, self.relay.resolve_model_route(session).model)
        if asked.kind is RouteKind.UPGRADE:
            return make_refusal(
                asked.dialect, 426, "WebSocket is not supported: send a POST to the same path"
            )
        message = f"unknown endpoint: `{request.method} {asked.place.path[:200]}`"
        return self._refuse(session, request, asked, 404, message, "not_found")

    async def _call(self, request: IncomingRequest, session: Session, asked: CallRoute) -> web.StreamResponse:
        refuse = partial(self._refuse, session, request, asked)
        self.calls += 1
        self.serving += 1
        try:
            async with session.call():
                if not self._unheld.is_set():
                    await self._unheld.wait()
                async with session.turn():
                    if asked.kind is RouteKind.COUNT:
                        return await self.relay.count(request, session, asked)
                    return await self.relay.pass_on(request, session, asked)
        except AttemptOver as error:
            return make_refusal(asked.dialect, 400, error.message, "attempt_over")
        except LimitReached as error:
            return refuse(400, error.message, "budget")
        except UnsupportedDialect as error:
            return refuse(400, error.message, "dialect")
        except UnreadableBody as error:
            return refuse(error.status, str(error))
        except OverfullRequest as error:
            return refuse(413, str(error))
        except MalformedRequest as error:
            return refuse(400, f"the request cannot be read: {error}")
        except RecordFailed as error:
            return refuse(500, error.message, "record")
        finally:
            self.serving -= 1

    def _refuse(
        self,
        session: Session,
        request: IncomingRequest,
        asked: CallRoute,
        status: int,
        message: str,
        code: str = "",
    ) -> web.Response:
        """Return an error of the gateway itself, and record it as an event of the session's attempt."""
        self._attempt_refusals.get(session.attempt, self._refusals).add(
            _name_call(request, asked), status, message
        )
        return make_refusal(asked.dialect, status, message, code or None)

    def _find_refusals(self, transport: asyncio.BaseTransport | None) -> RefusedCalls:
        """Find the attempt of a request without a valid key: by its socket, or the only attempt there is."""
        attempt = find_origin(transport)
        if attempt is None and (process := find_peer_process(transport)) is not None:
            attempt = self.attempt_of(process)
        if attempt not in self._attempt_refusals and len(self._attempt_refusals) == 1:
            [attempt] = self._attempt_refusals
        return self._refusals if attempt is None else self._attempt_refusals.get(attempt, self._refusals)

    def _on_closed(self, connection: GatewayConnection, status: int, why: str) -> None:
        """Record a connection that is closed to keep files free for others."""
        refused = self._attempt_refusals.get(connection.owner) if isinstance(connection.owner, int) else None
        (refused or self._find_refusals(connection.transport)).add("connection", status, why)

    def _on_unread(
        self, head: bytes, error: HttpProcessingError, transport: asyncio.BaseTransport | None
    ) -> None:
        """Record a request that cannot be parsed; its attempt is found by a key in its bytes."""
        attempt = next((s.attempt for key, s in self.sessions.items() if key.encode() in head), None)
        refused = self._attempt_refusals.get(attempt) if attempt is not None else None
        line = head.partition(b"\r\n")[0].partition(b"?")[0].decode(errors="replace")
        for key in self.sessions:
            line = line.replace(key, "...")
        (refused or self._find_refusals(transport)).add(line[:200], error.code, error.message)


def _most_files() -> int:
    """Return the process's limit on open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _refuse_keyless(dialect: Dialect) -> web.Response:
    return make_refusal(dialect, 401, KEYLESS, "invalid_api_key")


def _name_call(request: IncomingRequest, asked: CallRoute) -> str:
    """Return the name of a call in events: without its key and its query."""
    method = "POST" if isinstance(request, InProcessRequest) else request.method
    return f"{method} {asked.place.path[:200]}"


def _list_keys(request: web.BaseRequest, asked: CallRoute) -> Iterator[str]:
    """Yield the keys from all places where clients put them; the query is parsed last, only if needed."""
    yield asked.key
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    yield bearer.strip() if scheme.lower() == "bearer" else ""
    for dialect in DIALECTS.values():
        if dialect.key_header is not None:
            yield request.headers.get(dialect.key_header, "")
    yield request.query.get("key", "")


def _bind_unix_socket(path: Path) -> sockets.socket:
    """Return a socket that only this user can reach: its mode is set before any client can connect."""
    path.unlink(missing_ok=True)
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except BaseException:  # boundary: releases, then raises again
        listener.close()
        raise
    return listener
