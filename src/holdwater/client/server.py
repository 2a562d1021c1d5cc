"""A server as its clients reach it: connections, requests, problems, and the frames of an order's stream.

One try each: what is tried again, and for how long, is decided in `client.py`.
"""

from __future__ import annotations

import asyncio
import io
import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ..core.errors import BadInput
from ..core.serving import AnyEvent, Finished, Problem
from ..web.tokens import find_token, link_directories
from .errors import Busy, OrderRefused, ServerGone, Unauthorized
from .patience import Garbled, Lost

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

STREAM = "application/x-msgpack-stream"
PLAIN = "application/msgpack"
SILENCE = 35.0  # seconds without a byte: a living server says something every ten
CONNECTING = 10.0
LARGEST_FRAME = 256 * 1024 * 1024
LARGEST_PROBLEM = 64 * 1024
ENDING = 1.0  # seconds for the end of a stream, after its last event

_LENGTH = struct.Struct("!I")
_EVENT: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign bytes raises
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)


class Request(NamedTuple):
    """What is asked beside orders."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    fine: tuple[int, ...] = ()  # statuses of which the body is wanted, although they tell of a problem


class Reply(NamedTuple):
    status: int
    body: bytes


class TokenRenewed(Lost):
    """The server was started anew and has another token: the same can be asked again at once."""


class Server:
    """Used with `async with`. Orders have connections of their own, so that answers never wait for orders."""

    def __init__(
        self, url: str, key: str | None, connections: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.name = url
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://holdwater" if self._socket is not None else url.rstrip("/")
        parsed = URL(self._base)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BadInput(f"not the address of a server: `{url}`", "use `http://HOST:PORT` or `unix:PATH`")
        self._key = key
        self._token: str | None = None  # that the server made, where no key is given; found when it is needed
        self._connections = connections
        self._tls = tls
        self._streams: aiohttp.ClientSession | None = None
        self._requests: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Server:
        self._streams = self._session(0)  # bound: the orders that a client has in flight
        self._requests = self._session(self._connections)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._streams, self._requests):
            if session is not None:
                await session.close()

    @asynccontextmanager
    async def attended(self, order: bytes, headers: Mapping[str, str]) -> AsyncIterator[Frames]:
        """A connection that owns the order: what is told on it."""
        bearer = self._bearer()
        told = {"Content-Type": PLAIN, "Accept": STREAM, **bearer, **headers}
        try:
            async with _opened(self._streams).post(
                self._at("/v1/orders"), data=_body(order), headers=told, allow_redirects=False
            ) as response:
                await self._check(response, bearer)
                if response.content_type != STREAM:
                    raise Garbled(f"it answers an order with `{response.content_type}`")
                yield Frames(response.content)
        except _BROKEN as error:
            raise Lost(_described(error)) from error

    async def ask(self, request: Request) -> Reply:
        try:
            return await self._ask(request)
        except TokenRenewed:
            return await self._ask(request)

    async def _ask(self, request: Request) -> Reply:
        bearer = self._bearer()
        told = {"Content-Type": PLAIN, "Accept": PLAIN, **bearer, **request.headers}
        try:
            async with _opened(self._requests).request(
                request.method,
                self._at(request.path),
                data=_body(request.body),
                headers=told,
                allow_redirects=False,
            ) as response:
                if response.status not in request.fine:
                    await self._check(response, bearer)
                return Reply(response.status, await response.read())
        except _BROKEN as error:
            raise Lost(_described(error)) from error

    def _bearer(self) -> dict[str, str]:
        """The key, or the token that the server of this user made."""
        key = self._key
        if key is None:
            key = self._token = self._token or self._find_token()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _find_token(self) -> str | None:
        return find_token(self.name, link_directories(os.environ))

    async def _check(self, response: aiohttp.ClientResponse, sent: Mapping[str, str]) -> None:
        """Raise what the response says; a server that was started anew has another token."""
        try:
            await _check(response)
        except Unauthorized:
            if self._key is None:
                self._token = self._find_token()
                if self._bearer() != sent:
                    raise TokenRenewed("the server has a new token") from None
            raise

    def _at(self, path: str) -> URL:
        return URL(f"{self._base}{path}", encoded=True)

    def _session(self, limit: int) -> aiohttp.ClientSession:
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(self._socket, limit=limit)
        else:
            connector = aiohttp.TCPConnector(limit=limit, ssl=self._tls if self._tls is not None else True)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING, sock_read=SILENCE),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )


class Frames:
    """The events of a stream, one at a time; an event stays with the server until it is asked for."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self) -> AnyEvent | None:
        """The next event; None: a sign of life."""
        try:
            (length,) = _LENGTH.unpack(await self._content.readexactly(_LENGTH.size))
            if not length:
                return None
            if length > LARGEST_FRAME:
                raise Garbled(f"an event of {length} bytes, at most {LARGEST_FRAME} are taken")
            event = _EVENT.decode(await self._content.readexactly(length))
        except _BROKEN as error:
            raise Lost(_described(error)) from error
        except _UNREADABLE as error:
            raise Garbled(f"an event cannot be read: {error}") from error
        if isinstance(event, Finished):
            await self._end()
        return event

    async def _end(self) -> None:
        """Read the end of the stream: then its connection can carry the next order."""
        try:
            async with asyncio.timeout(ENDING):
                await self._content.readany()
        except _BROKEN:
            pass  # the result is here: what becomes of the connection is of no interest


def _opened(session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
    if session is None or session.closed:
        raise ServerGone("the client is closed", "it is used inside of `async with`")
    return session


def order_path(key: str, below: str = "") -> str:
    return f"/v1/orders/{quote(key, safe='')}{below}"


def decoded(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except _UNREADABLE as error:
        raise Garbled(f"an answer cannot be read: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    problem = await _problem(response)
    if response.status in (401, 403):
        raise Unauthorized(problem)
    if response.status == 429:
        raise Busy(problem)
    if response.status >= 500 and problem.code != "draining":
        raise Lost(f"{response.status} `{problem.code}`: {problem.message}", problem.after)
    raise OrderRefused(problem)


async def _problem(response: aiohttp.ClientResponse) -> Problem:
    body = await response.content.read(LARGEST_PROBLEM)
    try:
        packed = response.content_type == PLAIN
        found = (
            msgspec.msgpack.decode(body, type=Problem) if packed else msgspec.json.decode(body, type=Problem)
        )
    except _UNREADABLE:
        found = Problem(code="unknown", message=f"{response.status} {response.reason}: {body[:500]!r}")
    after = response.headers.get("Retry-After", "")
    return found if found.after or not after.isdigit() else msgspec.structs.replace(found, after=float(after))


def _described(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed in the middle"
    return str(error) or type(error).__name__


def _body(content: bytes | None) -> io.BytesIO | None:
    """As something that is read in pieces: an image must not hold up whoever else uses the loop."""
    return None if content is None else io.BytesIO(content)
