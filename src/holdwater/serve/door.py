"""The door: listens, checks who comes in, and leads each request to what it is about.

It keeps nothing. Orders are in `orders.py`, connections in `guests.py`, the words in `core/serving.py`; the
rules for requests are in `web/visitors.py`.
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
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import unquote

from aiohttp import web

from ..core.errors import BadInput, LedgerCorrupt, Refused, RunStopped
from ..core.serving import LONGEST_KEY, Problem, Steer
from ..core.text import clean_text
from ..gateway.server import LONGEST_SOCKET_PATH
from ..ledger.blobs import Blobs, is_hash
from ..rollout.duty import Duty
from ..run.metrics import exposition
from ..web.visitors import check_content
from .asked import check_steer
from .body import Bodies
from .desk import Desk
from .guests import Complaints, Guests, peer_of, refusal
from .orders import OWNER, Orders, document, model_key, problem_of
from .speech import JSON, MSGPACK, Speech, speech_of
from .terms import DoorTerms, Place, place_of, rules_of, secured
from .written import SERVER, SLICE

CLOSING = 0.5  # seconds that answers get to leave when the door closes
PATROL = 2.0  # seconds
WAITING = 1024  # connections that wait to be accepted
QUIET = ("busy", "draining", "conflict", "gone")  # what is no sign of a client that is wrong
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


class Door:
    """One server's. `async with Door(desk, terms) as door` listens at `door.address`."""

    def __init__(self, desk: Desk, terms: DoorTerms) -> None:
        self.address = ""
        self.addresses: list[str] = []  # all of them: a name such as `localhost` may have several
        self._desk = desk
        self._terms = terms
        self._place = place_of(terms)
        self._tls = secured(terms)
        self._rules = rules_of(terms, self._place)
        self._bodies = Bodies(terms.largest_order)
        self._complaints = Complaints(terms.note)
        self._stack = AsyncExitStack()

    @staticmethod
    def check(terms: DoorTerms) -> None:
        """Refuse terms on which no door can be opened, before anything is started."""
        place_of(terms)
        secured(terms)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._orders = Orders(self._desk, self._bodies, tasks, self._terms.note, self._terms.spool)
            self._guests = Guests(self._handle, self._terms.connections, self._complaints)
            patrol = Duty("patrol", PATROL, self._guests.patrol)
            stack.callback(tasks.create_task(patrol.perform(self._terms.note)).cancel)
            runner = web.ServerRunner(self._guests, shutdown_timeout=CLOSING)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            try:
                self.address = await self._listen(runner, stack)
            except BadInput as error:
                refused = error  # raised below, when all is closed: a TaskGroup would wrap it
            else:
                self._stack = stack.pop_all()
                return self
        raise refused

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _listen(self, runner: web.ServerRunner, stack: AsyncExitStack) -> str:
        place, scheme = self._place, "http" if self._tls is None else "https"
        site: web.BaseSite
        try:
            if place.path is not None:
                site = web.SockSite(runner, _unix(place), ssl_context=self._tls, backlog=WAITING)
                stack.callback(place.path.unlink, missing_ok=True)
            else:
                site = web.TCPSite(runner, place.host, place.port, ssl_context=self._tls, backlog=WAITING)
            await site.start()
        except OSError as error:
            told = error.strerror or str(error)
            raise BadInput(f"cannot listen on `{self._terms.listen}`: {told}") from None
        if place.path is not None:
            self.addresses = [self._terms.listen]
            return self._terms.listen
        self.addresses = [_url(scheme, host, port) for host, port, *_ in runner.addresses]
        return _url(scheme, place.host, runner.addresses[0][1])

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Whatever comes of a request, it is an answer, and nobody else's matter."""
        speech = speech_of(request.headers)
        try:
            key = self._rules.admit(request.headers)
            request[OWNER] = _owner(key) if key is not None and self._terms.separate else ""
            if request.body_exists:
                check_content(request.headers, (JSON, MSGPACK))
            found = _route(request)
            return await found.handler(self, request, speech, found.name)
        except Refused as error:
            problem = problem_of(error)
        except RunStopped as error:
            problem = Problem(code="broken", message=error.message, hint=error.hint)
        except ConnectionError:
            raise  # nobody is there any more to be told
        except Exception as error:  # boundary: one request's end, not the server's  # noqa: BLE001
            place = traceback.extract_tb(error.__traceback__)[-1]
            told = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            problem = Problem(code="internal", message=clean_text(told)[:2000])
        return self._refuse(request, problem, speech)

    def _refuse(self, request: web.BaseRequest, problem: Problem, speech: Speech) -> web.StreamResponse:
        if problem.code not in QUIET:
            self._complaints.tell(peer_of(request.transport), problem.code, problem.message)
        if request.writer.output_size > 0:
            raise ConnectionResetError("an answer that has begun can only be cut")
        return refusal(problem, speech)

    # One for each route; `name` is what stands in the path.

    async def _place_order(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        return await self._orders.place(request, speech)

    async def _show_order(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        return await self._orders.show(request, speech, name)

    async def _cancel_order(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        return await self._orders.cancel(request, speech, name)

    async def _answer(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        return await self._orders.answer(request, speech, name)

    async def _steer(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        async with self._bodies.read(request) as body:
            to: Steer = speech.decode(body, Steer)
        check_steer(to)
        await self._desk.steer(to, model_key(request))
        return web.Response(status=204, headers=SERVER)

    async def _drain(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        self._desk.drain()
        return document(self._desk.health(), speech, 202)

    async def _health(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        health = self._desk.health()
        return document(health, speech, 200 if health.ok else 503)

    async def _stats(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        return document(self._desk.stats(), speech)

    async def _metrics(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        body = exposition(self._desk.stats())
        return web.Response(body=body, headers={**SERVER, "Content-Type": PROMETHEUS})

    async def _blob(self, request: web.BaseRequest, speech: Speech, name: str) -> web.StreamResponse:
        """A medium of a conversation; one that is not what was written is cut before its end."""
        if self._terms.blobs is None or not is_hash(name):
            raise Refused("unknown", f"no such blob: {name[:80]!r}")
        response = web.StreamResponse(headers={**SERVER, "Content-Type": "application/octet-stream"})
        pieces = Blobs(self._terms.blobs).pieces(name, SLICE)
        try:
            piece = next(pieces, b"")
            await response.prepare(request)
            while piece:
                await response.write(piece)
                piece = next(pieces, b"")
        except LedgerCorrupt as error:
            raise Refused("internal" if response.prepared else "unknown", error.message) from None
        await response.write_eof()
        return response


Handler = Callable[[Door, web.BaseRequest, Speech, str], Awaitable[web.StreamResponse]]


class _Found(NamedTuple):
    handler: Handler
    name: str


ROUTES: dict[str, dict[str, Handler]] = {  # a pattern of the path -> by method
    "/v1/orders": {"POST": Door._place_order},
    "/v1/orders/([^/]+)": {"GET": Door._show_order, "DELETE": Door._cancel_order},
    "/v1/orders/([^/]+)/answers": {"POST": Door._answer},
    "/v1/model": {"POST": Door._steer},
    "/v1/health": {"GET": Door._health},
    "/v1/stats": {"GET": Door._stats},
    "/v1/drain": {"POST": Door._drain},
    "/v1/blobs/([^/]+)": {"GET": Door._blob},
    "/metrics": {"GET": Door._metrics},
}
_patterns = [(re.compile(pattern), methods) for pattern, methods in ROUTES.items()]


def _route(request: web.BaseRequest) -> _Found:
    path = request.rel_url.raw_path
    for pattern, methods in _patterns:
        if match := pattern.fullmatch(path):
            handler = methods.get(request.method)
            if handler is None:
                known = " or ".join(f"`{method}`" for method in methods)
                raise Refused("invalid", f"`{request.method[:20]}` is not for this path", f"use {known}")
            name = unquote(match[1]) if match.groups() else ""
            if len(name) > LONGEST_KEY:
                raise Refused("unknown", f"no such order: {name[:80]!r}...")
            return _Found(handler, name)
    raise Refused("unknown", f"nothing is served here: {path[:200]!r}", "see `holdwater help serving`")


def _owner(key: str) -> str:
    """What stands for a client's key in the ledger, and from which the key cannot be read."""
    return hashlib.blake2b(key.encode(), person=b"hw order owner", digest_size=16).hexdigest()


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _unix(place: Place) -> sockets.socket:
    """A socket that only this user can reach; one that a killed server left is replaced."""
    path = place.path
    assert path is not None
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise BadInput(f"the path of a socket has at most {LONGEST_SOCKET_PATH} bytes: `{path}`")
    listener = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    try:
        _clear(path)
        os.fchmod(listener.fileno(), stat.S_IRUSR | stat.S_IWUSR)  # the file that `bind` makes has this mode
        listener.bind(os.fspath(path))
    except BaseException:  # boundary: given back, then raised again
        listener.close()
        raise
    return listener


def _clear(path: Path) -> None:
    """Remove a socket that nobody listens to."""
    if not path.exists():
        return
    if not path.is_socket():
        raise BadInput(f"`{path}` is there, and is no socket")
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise BadInput(f"somebody listens there already: `{path}`")
