"""The server of the browser view: checks every request, then renders its page in a thread.

It listens on loopback unless it is asked otherwise, and wants a token, which the printed address carries once
and a cookie afterwards. Pages load nothing from elsewhere and contain no script.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Self
from urllib.parse import quote, urlencode

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from ..core.errors import BadInput, HoldwaterError, RequestRefused
from ..serve.settings import ServerSettings, make_rules, make_tls_context, resolve_address
from ..web.request_rules import check_content
from .control_pages import CONTROL_ROUTE, control_run
from .live import find_growth, follow_changes, send_work
from .page import PageRequest, PageResponse, render_error
from .routes import PAGES, WORK, show_page
from .run_pool import RunPool
from .static import STATIC

RENDERING = 4  # pages at once
PIECE = 64 * 1024  # bytes
CLOSING = 0.5  # seconds to finish sending when the server closes
TOKEN = "token"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # `no-referrer` would make browsers send `Origin: null` with forms
    "Cache-Control": "no-store",
}
STATUS = {"misdirected": 421, "unauthorized": 401, "foreign": 403, "read_only": 403, "content_type": 415}
FORM = "application/x-www-form-urlencoded"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ViewServer:
    """`async with ViewServer(pool, settings) as server` serves `server.address`."""

    def __init__(self, pool: RunPool, settings: ServerSettings, *, read_only: bool = False) -> None:
        self.token = secrets.token_urlsafe(32)
        self._form_token = "" if read_only else secrets.token_urlsafe(32)
        self.address = ""
        self._pool = pool
        self._place = resolve_address(settings._replace(keys=(self.token,)))
        self._rules = make_rules(settings._replace(keys=(self.token,)), self._place)
        self._tls = make_tls_context(settings)
        self._threads = ThreadPoolExecutor(RENDERING, thread_name_prefix="holdwater-page")
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        """The address with the token: opening it once sets the cookie."""
        return f"{self.address}/?{urlencode({TOKEN: self.token})}"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._check], logger=_silent)
        app.router.add_get("/static/{name}", self._send_static)
        app.router.add_get("/{name:favicon.ico}", self._send_static)
        app.router.add_get("/runs/{run}/live", self._follow)
        app.router.add_get("/runs/{run}/attempts/{attempt}/live", self._follow)
        for path in PAGES:
            app.router.add_get(path, self._send_page)
        for path in WORK:
            app.router.add_get(path, self._send_work)
        app.router.add_post(CONTROL_ROUTE, self._control_run)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSING, handler_cancellation=True)
        async with AsyncExitStack() as stack:
            stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            self.address = await self._listen(runner)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _listen(self, runner: web.AppRunner) -> str:
        if self._place.path is not None:
            raise BadInput("a browser cannot open a unix socket: `--listen` must be HOST:PORT")
        site = web.TCPSite(runner, self._place.host, self._place.port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            place = f"{self._place.host}:{self._place.port}"
            raise BadInput(f"cannot listen on `{place}`: {error.strerror or error}") from None
        host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
        return f"{'http' if self._tls is None else 'https'}://{host}:{runner.addresses[0][1]}"

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit a request by its headers, cookie or token; turn every error into a page."""
        try:
            self._rules.admit(self._with_key(request))
            if TOKEN in request.query:
                response: web.StreamResponse = self._keep_token(request)
            else:
                response = await handler(request)
        except RequestRefused as refused:
            response = _respond(render_error(STATUS.get(refused.code, 400), refused.message, refused.hint))
        except web.HTTPException as error:
            response = _respond(render_error(error.status, error.reason))
        except HoldwaterError as error:  # of the stream: pages catch their own
            response = _respond(render_error(404, error.message, error.hint))
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
        return response

    def _with_key(self, request: web.Request) -> CIMultiDictProxy[str]:
        """Return the request's headers, with the key from its address or cookie if no header has one."""
        headers = CIMultiDict(request.headers)
        key = request.query.get(TOKEN) or request.cookies.get(self._cookie)
        if key and "Authorization" not in headers:
            headers["X-Api-Key"] = key
        return CIMultiDictProxy(headers)

    def _keep_token(self, request: web.Request) -> web.Response:
        """Move the token from the address to a cookie, so that no copied address has it."""
        rest = {name: value for name, value in request.query.items() if name != TOKEN}
        response = web.Response(status=303, headers={"Location": str(request.rel_url.with_query(rest))})
        response.set_cookie(
            self._cookie, self.token, httponly=True, samesite="Strict", secure=self._tls is not None
        )
        return response

    @property
    def _cookie(self) -> str:
        """The cookie's name; cookies of one host are shared by all its ports."""
        return f"holdwater-{self.address.rpartition(':')[2]}"

    async def _send_page(self, request: web.Request) -> web.StreamResponse:
        work = partial(show_page, _find_path(request), self._describe(request))
        page = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        return _respond(page) if page.pieces is None else await self._send_pieces(request, page)

    async def _send_work(self, request: web.Request) -> web.StreamResponse:
        return await send_work(WORK[_find_path(request)](self._describe(request)), request, self._threads)

    def _describe(self, request: web.Request) -> PageRequest:
        fragment = request.headers.get("HX-Request-Type") == "partial"
        parts = dict(request.match_info)
        return PageRequest(self._pool, parts, request.query, fragment, self._form_token)

    async def _control_run(self, request: web.Request) -> web.StreamResponse:
        """Send the request of a form to a run, then show the page of the form again."""
        check_content(request.headers, (FORM,))
        fields = {name: value for name, value in (await request.post()).items() if isinstance(value, str)}
        asked = PageRequest(self._pool, dict(request.match_info), fields, form_token=self._form_token)
        return _respond(await asyncio.get_running_loop().run_in_executor(self._threads, control_run, asked))

    async def _send_pieces(self, request: web.Request, page: PageResponse) -> web.StreamResponse:
        """Send a response that is never whole in memory; a browser that is gone ends its reading."""
        assert page.pieces is not None
        pieces, loop = _join_pieces(page.pieces), asyncio.get_running_loop()
        response = web.StreamResponse(headers={**HEADERS, **_describe_download(page.name)})
        response.content_type = page.kind
        if page.charset is not None:
            response.charset = page.charset
        try:
            await response.prepare(request)
            while (piece := await loop.run_in_executor(self._threads, next, pieces, None)) is not None:
                await response.write(piece)
        finally:
            await loop.run_in_executor(self._threads, pieces.close)
        return response

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        asked = PageRequest(self._pool, dict(request.match_info), request.query)
        loop = asyncio.get_running_loop()
        state = await loop.run_in_executor(self._threads, find_growth, asked)
        return await follow_changes(state, request)

    async def _send_static(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in STATIC:
            raise web.HTTPNotFound
        headers = {"Cache-Control": "max-age=3600"}
        return web.FileResponse(STATIC[name], headers=headers)


def _find_path(request: web.Request) -> str:
    """Return the address of a route with its placeholders."""
    resource = request.match_info.route.resource
    assert resource is not None
    return resource.canonical


def _join_pieces(pieces: Iterator[bytes]) -> Generator[bytes]:
    """Yield the same bytes in pieces of at least `PIECE` bytes: each is a change of threads."""
    joined = bytearray()
    for piece in pieces:
        joined += piece
        if len(joined) >= PIECE:
            yield bytes(joined)
            joined.clear()
    yield bytes(joined)


def _describe_download(name: str) -> dict[str, str]:
    return {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"} if name else {}


def _respond(page: PageResponse) -> web.StreamResponse:
    if page.location:
        return web.Response(status=303, headers={"Location": page.location})
    if page.file is not None:
        return web.FileResponse(page.file, headers=_describe_download(page.file.name))
    return web.Response(status=page.status, body=page.body, content_type=page.kind, charset=page.charset)


_silent = logging.Logger("holdwater.view")  # discards aiohttp's error logs: errors are pages
_silent.addHandler(logging.NullHandler())
