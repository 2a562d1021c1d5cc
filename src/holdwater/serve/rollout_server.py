"""The HTTP server: listens, authorizes requests and routes them. It stores nothing.

`orders.py` handles orders, `connection_server.py` connections. `core/serving_protocol.py` defines the
records, and `web/request_rules.py` the rules for requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import socket as sockets
import stat
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from aiohttp import web

from ..core.errors import BadInput, LedgerCorrupt, RequestRefused, RunStopped
from ..core.masking import clean_text
from ..core.serving_protocol import LONGEST_KEY, ProblemDetails, SteerRequest
from ..ledger.blobs import BlobStore, is_hash
from ..rollout.periodic_task import PeriodicTask
from ..run.orders.metrics import render_metrics
from ..web.request_rules import check_content
from .backend import ServerBackend
from .bodies import SERVER_HEADERS, SLICE, BoundedBodies
from .connection_server import ConnectionServer, PeerWarnings, peer_of, render_problem
from .orders import OWNER, OrderRoutes, model_key, problem_of, render_record
from .settings import (
    ListenAddress,
    ServerSettings,
    clear_socket,
    make_rules,
    make_tls_context,
    resolve_address,
)
from .wire_format import JSON, MSGPACK, WireFormat, check_steer, negotiate_format

CLOSING = 0.5  # seconds to finish sending responses when the server closes
PATROL = 2.0  # seconds between two checks for dead connections
BACKLOG = 1024  # connections waiting to be accepted
UNREPORTED_CODES = ("busy", "draining", "conflict", "gone")  # no sign of a faulty client
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class RolloutServer:
    """`async with RolloutServer(backend, settings) as server` listens on `server.address`."""

    def __init__(self, desk: ServerBackend[Any], terms: ServerSettings) -> None:
        self.address = ""
        self.addresses: list[str] = []  # all addresses: a name such as `localhost` may have several
        self._backend = desk
        self._settings = terms
        self._listen_address = resolve_address(terms)
        self._tls = make_tls_context(terms)
        self._rules = make_rules(terms, self._listen_address)
        self._bodies = BoundedBodies(terms.largest_order)
        self._warnings = PeerWarnings(terms.note)
        self._announced = asyncio.Event()
        self._stack = AsyncExitStack()

    @staticmethod
    def check(terms: ServerSettings) -> None:
        """Raise `BadInput` for invalid settings, before anything is started."""
        resolve_address(terms)
        make_tls_context(terms)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._orders = OrderRoutes(
                self._backend, self._bodies, tasks, self._settings.note, self._settings.spool
            )
            self._connections = ConnectionServer(self._handle, self._settings.connections, self._warnings)
            patrol = PeriodicTask("patrol", PATROL, self._connections.patrol)
            stack.callback(tasks.create_task(patrol.perform(self._settings.note)).cancel)
            runner = web.ServerRunner(self._connections, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            try:
                self.address = await self._listen(runner, stack)
            except BadInput as error:
                refused = error  # raised below, after everything is closed: a TaskGroup would wrap it
            else:
                await stack.enter_async_context(self._settings.announce(self.addresses))
                self._announced.set()
                self._stack = stack.pop_all()
                return self
        raise refused

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _listen(self, runner: web.ServerRunner, stack: AsyncExitStack) -> str:
        place, scheme = self._listen_address, "http" if self._tls is None else "https"
        site: web.BaseSite
        try:
            if place.path is not None:
                site = web.SockSite(runner, _bind_unix_socket(place), ssl_context=self._tls, backlog=BACKLOG)
                stack.callback(place.path.unlink, missing_ok=True)
            else:
                site = web.TCPSite(runner, place.host, place.port, ssl_context=self._tls, backlog=BACKLOG)
            await site.start()
        except OSError as error:
            told = error.strerror or str(error)
            raise BadInput(f"cannot listen on `{self._settings.listen}`: {told}") from None
        if place.path is not None:
            self.addresses = [self._settings.listen]
            return self._settings.listen
        self.addresses = [_url(scheme, host, port) for host, port, *_ in runner.addresses]
        return _url(scheme, place.host, runner.addresses[0][1])

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request. Every error becomes the response to this request and affects no other."""
        speech = negotiate_format(request.headers)
        await self._announced.wait()  # a refused client looks for the token once more, and finds it
        try:
            key = self._rules.admit(request.headers)
            request[OWNER] = _hash_key(key) if key is not None and self._settings.separate else ""
            if request.body_exists:
                check_content(request.headers, (JSON, MSGPACK))
            handler, name = _route(request)
            return await handler(self, request, speech, name)
        except RequestRefused as error:
            problem = problem_of(error)
        except RunStopped as error:
            problem = ProblemDetails(code="broken", message=error.message, hint=error.hint)
        except ConnectionError:
            raise  # the client is gone: there is no connection for a response
        except Exception as error:  # boundary: fails one request, not the server  # noqa: BLE001
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            problem = ProblemDetails(code="internal", message=clean_text(told)[:2000])
        return self._refuse(request, problem, speech)

    def _refuse(
        self, request: web.BaseRequest, problem: ProblemDetails, speech: WireFormat
    ) -> web.StreamResponse:
        if problem.code not in UNREPORTED_CODES:
            self._warnings.warn(peer_of(request.transport), problem.code, problem.message)
        if request.writer.output_size > 0:
            raise ConnectionResetError("a response that has begun can only be cut off")
        return render_problem(problem, speech)

    # One handler for each route; `name` is the variable part of the path.

    async def _place_order(
        self, request: web.BaseRequest, speech: WireFormat, name: str
    ) -> web.StreamResponse:
        return await self._orders.place(request, speech)

    async def _show_order(
        self, request: web.BaseRequest, speech: WireFormat, name: str
    ) -> web.StreamResponse:
        return await self._orders.show(request, speech, name)

    async def _cancel_order(
        self, request: web.BaseRequest, speech: WireFormat, name: str
    ) -> web.StreamResponse:
        return await self._orders.cancel(request, speech, name)

    async def _answer(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        return await self._orders.answer(request, speech, name)

    async def _steer(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        async with self._bodies.read(request) as body:
            to: SteerRequest = speech.decode(body, SteerRequest)
        check_steer(to)
        await self._backend.steer(to, model_key(request))
        return web.Response(status=204, headers=SERVER_HEADERS)

    async def _drain(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        self._backend.drain()
        return render_record(self._backend.health(), speech, 202)

    async def _health(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        health = self._backend.health()
        return render_record(health, speech, 200 if health.ok else 503)

    async def _stats(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        return render_record(self._backend.stats(), speech)

    async def _metrics(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        body = render_metrics(self._backend.stats())
        return web.Response(body=body, headers={**SERVER_HEADERS, "Content-Type": PROMETHEUS})

    async def _blob(self, request: web.BaseRequest, speech: WireFormat, name: str) -> web.StreamResponse:
        """Send a blob of a conversation. The response of a corrupt blob is cut off before its end."""
        if self._settings.blobs is None or not is_hash(name):
            raise RequestRefused("unknown", f"no such blob: {name[:80]!r}")
        response = web.StreamResponse(headers={**SERVER_HEADERS, "Content-Type": "application/octet-stream"})
        pieces = BlobStore(self._settings.blobs).read_pieces(name, SLICE)
        try:
            piece = next(pieces, b"")
            await response.prepare(request)
            while piece:
                await response.write(piece)
                piece = next(pieces, b"")
        except LedgerCorrupt as error:
            raise RequestRefused("internal" if response.prepared else "unknown", error.message) from None
        await response.write_eof()
        return response


RouteHandler = Callable[[RolloutServer, web.BaseRequest, WireFormat, str], Awaitable[web.StreamResponse]]


ROUTES: dict[str, dict[str, RouteHandler]] = {  # pattern of the path -> method -> handler
    "/v1/orders": {"POST": RolloutServer._place_order},
    "/v1/orders/([^/]+)": {"GET": RolloutServer._show_order, "DELETE": RolloutServer._cancel_order},
    "/v1/orders/([^/]+)/answers": {"POST": RolloutServer._answer},
    "/v1/model": {"POST": RolloutServer._steer},
    "/v1/health": {"GET": RolloutServer._health},
    "/v1/stats": {"GET": RolloutServer._stats},
    "/v1/drain": {"POST": RolloutServer._drain},
    "/v1/blobs/([^/]+)": {"GET": RolloutServer._blob},
    "/metrics": {"GET": RolloutServer._metrics},
}
_patterns = [(re.compile(pattern), methods) for pattern, methods in ROUTES.items()]


def _route(request: web.BaseRequest) -> tuple[RouteHandler, str]:
    """Return the handler of a request, and the variable part of its path."""
    path = request.rel_url.raw_path
    for pattern, methods in _patterns:
        if match := pattern.fullmatch(path):
            handler = methods.get(request.method)
            if handler is None:
                known = " or ".join(f"`{method}`" for method in methods)
                raise RequestRefused(
                    "invalid", f"method not allowed for this path: `{request.method[:20]}`", f"use {known}"
                )
            name = unquote(match[1]) if match.groups() else ""
            if len(name) > LONGEST_KEY:
                raise RequestRefused("unknown", f"no such order: {name[:80]!r}...")
            return handler, name
    raise RequestRefused("unknown", f"unknown path: {path[:200]!r}", "see `holdwater help serving`")


def _hash_key(key: str) -> str:
    """Return a hash that stands for a client's API key in the ledger and does not reveal it."""
    return hashlib.blake2b(key.encode(), person=b"hw order owner", digest_size=16).hexdigest()


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _bind_unix_socket(place: ListenAddress) -> sockets.socket:
    """Bind a socket that only this user can reach; replace one that a killed server left behind."""
    path = place.path
    assert path is not None
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        clear_socket(path)
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # `bind` creates its file with this mode
        listener.bind(os.fspath(path))
    except BaseException:  # boundary: the socket is closed, then the error is raised again
        listener.close()
        raise
    return listener
