"""The listener: finds the session of each call by its key and refuses what has none.

It listens on a unix socket, for sandboxes, on 127.0.0.1, for code in the worker, and on the address of a
network of containers where there is one. A call's own way is in `relay.py`, its attempt's in `sessions.py`.
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
from types import TracebackType
from typing import Self

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from ..core.authoring import ExchangeLog, Recording
from ..core.containers import CONTAINER_PORTS
from ..core.errors import AttemptOver, BadInput, LimitReached, RunFailed
from ..core.records import Limits, MiB
from .behind import Behind
from .body import Admission
from .connection import GatewayConnection, GatewayServer
from .dialects import Dialect
from .incoming import Unreadable
from .near import Near, Request
from .open_connections import ClientConnection, OpenConnections, process_behind
from .recorder import Malformed
from .refusals import RefusedCalls
from .relay import KEEP_ALIVE, Relay, Unspoken
from .routes import CHAT, COMPLETIONS, Kind, Route, route
from .sessions import RecordFailed, Session
from .side import SERVER, models, refusal
from .terms import SharedMeans, Terms
from .upstreams import Upstream
from .value_count import OverfullRequest

LONGEST_SOCKET_PATH = 107  # bytes, the kernel's limit
LONGEST_HEADER = 64 * 1024
MOST_HEADERS = 512
READ_AHEAD = (
    64 * 1024
)  # bytes of a body that are read before it is admitted: half of what a connection can hold
IDLE = 3600.0  # seconds that a connection without calls is kept
KEYLESS = "no attempt is running with this key"
CLOSING = 1.0  # seconds that answers get to leave when the gateway closes


def _nothing(what: str, attempt: int | None = None) -> None:
    """What happens by default to the news of a failed clean-up, or of a refused request."""


def _unknown(process: int) -> None:
    """Which attempt a process belongs to, by default."""


class Gateway:
    """One worker's listener. `async with Gateway(upstream, socket) as gateway`."""

    def __init__(
        self,
        upstream: Upstream,
        socket: Path,
        *,
        model: str | None = None,
        admitted_bytes: int = 16 * MiB,
        body_cap: int = 256 * MiB,
        keep_alive: float = KEEP_ALIVE,
        terms: Terms = Terms(),  # noqa: B008 (a frozen record)
    ) -> None:
        if len(os.fsencode(socket)) > LONGEST_SOCKET_PATH:
            raise BadInput(f"the path of a socket has at most {LONGEST_SOCKET_PATH} bytes: `{socket}`")
        self.socket = socket
        self.url = ""
        self.outside_url = ""  # for containers
        self.sessions: dict[str, Session] = {}  # by key; an entry lives as long as its scope
        own = Behind(upstream, model, terms.sampling)
        self.relay = Relay(own, Admission(admitted_bytes), body_cap, keep_alive)
        self.calls = 0  # that came so far
        self.serving = 0  # of them, those in flight
        self._terms = terms
        self.on_failed_cleanup: Callable[[str], None] = _nothing
        self.on_refused: Callable[[str, int | None], None] = _nothing  # with the attempt, where it is known
        self.attempt_of: Callable[[int], int | None] = _unknown  # by the id of a process
        self._refused = RefusedCalls(lambda what: self.on_refused(what, None))
        self._refused_of: dict[int, RefusedCalls] = {}  # by attempt; an entry lives as long as its session
        self.executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gateway-media")
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.executor.shutdown, wait=False)
            stack.callback(self._refused.close)
            self.connections = OpenConnections(_most_files(), self._closed)
            stack.callback(self.connections.close)
            server = GatewayServer(
                self._handle,
                self._unread,
                self.connections,
                handler_cancellation=True,
                access_log=None,
                keepalive_timeout=IDLE,
                max_line_size=LONGEST_HEADER,
                max_field_size=LONGEST_HEADER,
                max_headers=MOST_HEADERS,
                read_bufsize=READ_AHEAD,
                auto_decompress=False,
            )
            runner = web.ServerRunner(server, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            stack.callback(self.socket.unlink, missing_ok=True)
            await web.SockSite(runner, _unix(self.socket), backlog=1024).start()
            tcp = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
            await tcp.start()
            self.url = f"http://127.0.0.1:{runner.addresses[-1][1]}/v1"
            self._runner = runner
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def model_of(self, key: str) -> str | None:
        """The model's name that is imposed on the session with this key; None: as the agent asks."""
        session = self.sessions.get(key)
        return self.relay.own.model if session is None else self.relay.behind(session).model

    def steer(self, own: Behind) -> None:
        """From now on this answers the calls of sessions that have nobody else behind them.

        Those that are on their way stay where they are.
        """
        self.relay.own = own

    async def listen_on(self, address: str) -> None:
        """Take a port of ours on the network of containers: what stands before it lets these through."""
        for port in CONTAINER_PORTS:
            try:
                await web.TCPSite(self._runner, address, port, backlog=1024).start()
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise RunFailed(
                    f"cannot listen for containers: `{address}`: {error.strerror}",
                    "their network is not on this machine: run holdwater where the docker daemon is",
                    kind="gateway",
                ) from error
            self.outside_url = f"http://{address}:{port}/v1"
            return
        raise RunFailed(f"no free port for containers: `{address}`", kind="gateway")

    @asynccontextmanager
    async def session(
        self,
        attempt: int,
        log: ExchangeLog,
        limits: Limits = Limits(),  # noqa: B008 (a frozen record)
        recording: Recording | None = None,
        behind: Behind | None = None,
    ) -> AsyncIterator[Session]:
        """A place for `attempt`, whose exchanges go to `log`. Its key works in this scope and never after.

        What `recording` knows is answered from it, all else by who is `behind` it.
        """
        terms = self._terms
        if behind is not None and behind.upstream is not None:  # price and rate are those of the run's model
            terms = terms._replace(price=None, rate=None, shared=False)
        shared = SharedMeans(self.executor, self.relay.admission)
        session = Session(attempt, log, shared, limits, terms, recording, behind)
        self._refused_of[attempt] = RefusedCalls(lambda what: self.on_refused(what, attempt))
        try:
            async with self._served(session):
                yield session
        finally:
            self._refused_of.pop(attempt).close()

    @asynccontextmanager
    async def lend(self, session: Session, by: str) -> AsyncIterator[Session]:
        """A session with a key of its own for a borrower of that name: see `Session.lent`."""
        with session.lent(by) as borrower:
            async with self._served(borrower):
                yield borrower

    @asynccontextmanager
    async def _served(self, session: Session) -> AsyncIterator[None]:
        self.sessions[session.key] = session
        try:
            yield
        finally:
            del self.sessions[session.key]
            if not await session.close():
                self.on_failed_cleanup(f"calls of attempt {session.attempt} did not end when it closed")

    async def ask(self, key: str, near: Near) -> tuple[int, bytes]:
        """A Chat Completions call from this process: the status and the body of its answer."""
        await asyncio.sleep(0)  # an answer that is at hand would never let others have their turn
        response = await self._answered(near, key)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        return response.status, response.body

    async def _answered(self, near: Near, key: str) -> web.StreamResponse:
        if (session := self.sessions.get(key)) is None:
            return _keyless(CHAT)
        try:
            return await self._call(near, session, COMPLETIONS)
        except Exception as error:  # boundary: not the agent's, who would be blamed for it  # noqa: BLE001
            return refusal(CHAT, 500, f"internal error: {type(error).__name__}: {error}", "internal")

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = route(request)
        if asked.kind is Kind.ROOT:
            return web.Response(headers=SERVER)
        session = self._session_of(request, asked)
        if session is None:
            self._refused_by(request.transport).add(_name(request, asked), 401, KEYLESS)
            return _keyless(asked.dialect)
        connection = request.protocol
        assert isinstance(connection, GatewayConnection)
        self.connections.claim(connection, session.attempt)
        if asked.kind in (Kind.TURN, Kind.COUNT):
            connection.calls += 1
            try:
                return await self._call(request, session, asked)
            finally:
                connection.calls -= 1
        if asked.kind is Kind.MODELS:
            return models(asked.dialect, asked.model, self.relay.behind(session).model)
        if asked.kind is Kind.UPGRADE:
            return refusal(asked.dialect, 426, "no WebSocket is served here: call the same path by POST")
        message = f"not served here: `{request.method} {asked.place.path[:200]}`"
        return self._refuse(session, request, asked, 404, message, "not_found")

    async def _call(self, request: Request, session: Session, asked: Route) -> web.StreamResponse:
        refuse = partial(self._refuse, session, request, asked)
        self.calls += 1
        self.serving += 1
        try:
            async with session.call(), session.turn():
                if asked.kind is Kind.COUNT:
                    return await self.relay.count(request, session, asked)
                return await self.relay.pass_on(request, session, asked)
        except AttemptOver as error:
            return refusal(asked.dialect, 400, error.message, "attempt_over")
        except LimitReached as error:
            return refuse(400, error.message, "budget")
        except Unspoken as error:
            return refuse(400, error.message, "dialect")
        except Unreadable as error:
            return refuse(error.status, str(error))
        except OverfullRequest as error:
            return refuse(413, str(error))
        except Malformed as error:
            return refuse(400, f"the request cannot be read: {error}")
        except RecordFailed as error:
            return refuse(500, error.message, "record")
        finally:
            self.serving -= 1

    def _refuse(
        self, session: Session, request: Request, asked: Route, status: int, message: str, code: str = ""
    ) -> web.Response:
        """An error of the gateway itself, which is an event of the session's attempt."""
        self._refused_of.get(session.attempt, self._refused).add(_name(request, asked), status, message)
        return refusal(asked.dialect, status, message, code or None)

    def _refused_by(self, transport: asyncio.BaseTransport | None) -> RefusedCalls:
        """Where a request without a key counts: by its process, or by the only attempt that there is."""
        process = process_behind(transport)
        attempt = self.attempt_of(process) if process is not None else None
        if attempt not in self._refused_of and len(self._refused_of) == 1:
            [attempt] = self._refused_of
        return self._refused if attempt is None else self._refused_of.get(attempt, self._refused)

    def _closed(self, connection: ClientConnection, status: int, why: str) -> None:
        """A connection is closed to keep files for others."""
        refused = self._refused_of.get(connection.owner) if isinstance(connection.owner, int) else None
        (refused or self._refused_by(connection.transport)).add("connection", status, why)

    def _unread(
        self, head: bytes, error: HttpProcessingError, transport: asyncio.BaseTransport | None
    ) -> None:
        """A request could not be read, so that its key is not known but by its bytes."""
        attempt = next((s.attempt for key, s in self.sessions.items() if key.encode() in head), None)
        refused = self._refused_of.get(attempt) if attempt is not None else None
        line = head.partition(b"\r\n")[0].partition(b"?")[0].decode(errors="replace")
        for key in self.sessions:
            line = line.replace(key, "...")
        (refused or self._refused_by(transport)).add(line[:200], error.code, error.message)

    def _session_of(self, request: web.BaseRequest, asked: Route) -> Session | None:
        """By the first of its keys that is one; a client that has ours in its path may send another."""
        return next((self.sessions[key] for key in _keys(request, asked) if key in self.sessions), None)


def _most_files() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _keyless(dialect: Dialect) -> web.Response:
    return refusal(dialect, 401, KEYLESS, "invalid_api_key")


def _name(request: Request, asked: Route) -> str:
    """A call as events name it: without a key, and without its query."""
    method = "POST" if isinstance(request, Near) else request.method
    return f"{method} {asked.place.path[:200]}"


def _keys(request: web.BaseRequest, asked: Route) -> Iterator[str]:
    """Wherever a client may put one; a query is taken apart only if there is none elsewhere."""
    yield asked.key
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    yield bearer.strip() if scheme.lower() == "bearer" else ""
    yield request.headers.get("x-api-key", "")
    yield request.headers.get("x-goog-api-key", "")
    yield request.query.get("key", "")


def _unix(path: Path) -> sockets.socket:
    """A socket that only this user can reach: it gets its mode before anyone can connect."""
    path.unlink(missing_ok=True)
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except BaseException:  # boundary: given back, then raised again
        listener.close()
        raise
    return listener
