"""Connects a client to a server: connections, requests, error replies, back-off, and the frames of a stream.

Each request is tried once: `async_client.py` decides about retries. An error reply becomes an exception of
the client. A failed rollout raises none: its failure is data, in its `Rollout`.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ..core.errors import BadInput, HoldwaterError
from ..core.failures import double_delay
from ..core.serving_protocol import AnyOrderEvent, Finished, ProblemDetails
from ..web.tokens import find_token, list_link_directories

if TYPE_CHECKING:
    import ssl

T = TypeVar("T")

STREAM = "application/x-msgpack-stream"
MSGPACK = "application/msgpack"
SILENCE = 35.0  # seconds without a byte before a connection counts as lost; keep-alives come every ten
CONNECTING = 10.0
LARGEST_FRAME = 256 * 1024 * 1024
LARGEST_PROBLEM = 64 * 1024
FIRST_DELAY = 0.05  # seconds before the second try; short: a server waits only a few for a lost client
LONGEST_DELAY = 2.0  # seconds between two tries
MOST_INVALID = 5  # unreadable replies before the peer counts as something other than a holdwater server
ENDING = 1.0  # seconds to wait for the end of a stream after its last event

_LENGTH = struct.Struct("!I")
_EVENT: msgspec.msgpack.Decoder[AnyOrderEvent] = msgspec.msgpack.Decoder(AnyOrderEvent)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # raised by decoding foreign bytes
_BROKEN = (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError)


class ServerGone(HoldwaterError):
    """The server did not respond within the client's `patience`. The order can be sent again with its key."""


class OrderRefused(HoldwaterError):
    """The server rejects this request; sending it again does not help."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.code


class AccessRefused(OrderRefused):
    """The server rejects the API key."""


class ServerBusy(HoldwaterError):
    """The server accepts no more work for now; retry after `after` seconds."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem
        self.after = problem.after


class ConnectionLost(Exception):
    """The connection broke, or the server is not ready. The same request can be sent again."""

    def __init__(self, message: str, after: float = 0.0) -> None:
        super().__init__(message)
        self.after = after


class InvalidReply(ConnectionLost):
    """The reply is not one that a holdwater server sends."""


class ServerRequest(NamedTuple):
    """A request other than an order."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    accepted: tuple[int, ...] = ()  # error statuses whose body is returned, not raised


class ServerReply(NamedTuple):
    status: int
    body: bytes


class TokenRenewed(ConnectionLost):
    """The server was restarted and has a new token: the same request can be sent again at once."""


class ServerConnection:
    """The connections to one server, open inside of `async with`.

    Orders have connections of their own, so that answers never wait for orders.
    """

    def __init__(
        self, url: str, key: str | None, connections: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self.name = url
        self._socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        self._base = "http://holdwater" if self._socket is not None else url.rstrip("/")
        parsed = URL(self._base)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BadInput(f"invalid server address: `{url}`", "use `http://HOST:PORT` or `unix:PATH`")
        self._key = key
        self._token: str | None = None  # made by the server; used without a key, looked up when needed
        self._connections = connections
        self._tls = tls
        self._streams: aiohttp.ClientSession | None = None
        self._requests: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerConnection:
        self._streams = self._session(0)  # bound: the client's orders in flight
        self._requests = self._session(self._connections)
        return self

    async def __aexit__(self, *error: object) -> None:
        for session in (self._streams, self._requests):
            if session is not None:
                await session.close()

    @asynccontextmanager
    async def open_stream(self, order: bytes, headers: Mapping[str, str]) -> AsyncIterator[EventReader]:
        """Send an order and open the stream of its events. The order belongs to this connection."""
        bearer = self._bearer()
        told = {"Content-Type": MSGPACK, "Accept": STREAM, **bearer, **headers}
        try:
            async with _require_open(self._streams).post(
                self._build_url("/v1/orders"), data=_body(order), headers=told, allow_redirects=False
            ) as response:
                await self._check(response, bearer)
                if response.content_type != STREAM:
                    raise InvalidReply(
                        f"unexpected content type in the reply to an order: `{response.content_type}`"
                    )
                yield EventReader(response.content)
        except _BROKEN as error:
            raise ConnectionLost(_describe_error(error)) from error

    async def ask(self, request: ServerRequest) -> ServerReply:
        try:
            return await self._ask(request)
        except TokenRenewed:
            return await self._ask(request)

    async def _ask(self, request: ServerRequest) -> ServerReply:
        bearer = self._bearer()
        told = {"Content-Type": MSGPACK, "Accept": MSGPACK, **bearer, **request.headers}
        try:
            async with _require_open(self._requests).request(
                request.method,
                self._build_url(request.path),
                data=_body(request.body),
                headers=told,
                allow_redirects=False,
            ) as response:
                if response.status not in request.accepted:
                    await self._check(response, bearer)
                return ServerReply(response.status, await response.read())
        except _BROKEN as error:
            raise ConnectionLost(_describe_error(error)) from error

    def _bearer(self) -> dict[str, str]:
        """Return the header with the API key, or with the token that this user's server made."""
        key = self._key
        if key is None:
            key = self._token = self._token or self._find_token()
        return {} if key is None else {"Authorization": f"Bearer {key}"}

    def _find_token(self) -> str | None:
        return find_token(self.name, list_link_directories(os.environ))

    async def _check(self, response: aiohttp.ClientResponse, sent: Mapping[str, str]) -> None:
        """Raise the error in the response; raise `TokenRenewed` if a restarted server has a new token."""
        try:
            await _check(response)
        except AccessRefused:
            if self._key is None:
                self._token = self._find_token()
                if self._bearer() != sent:
                    raise TokenRenewed("the server has a new token") from None
            raise

    def _build_url(self, path: str) -> URL:
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


class ReconnectBackoff:
    """The retry back-off of one order, or of one request."""

    def __init__(self, server: str, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        self._until: float | None = None  # None: the last try succeeded
        self._tries = 0
        self._invalid = 0

    def reset(self) -> None:
        """Start over: the server responds and works."""
        self._until = None
        self._tries = 0

    async def wait(self, lost: ConnectionLost) -> None:
        """Sleep until the next retry; raise `ServerGone` when the time for retries is used up."""
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._seconds
        self._invalid += isinstance(lost, InvalidReply)
        left = self._until - now
        if left <= 0 or self._invalid >= MOST_INVALID:
            raise ServerGone(f"the server at `{self._server}` is gone: {lost}", "is it running?") from None
        self._tries += 1
        delay = double_delay(FIRST_DELAY, self._tries, LONGEST_DELAY) * random.uniform(0.5, 1.0)
        await asyncio.sleep(min(max(lost.after, delay), left))


class EventReader:
    """Reads the events of a stream one at a time, so that unread events stay on the server."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self) -> AnyOrderEvent | None:
        """Return the next event, or None for a keep-alive."""
        try:
            (length,) = _LENGTH.unpack(await self._content.readexactly(_LENGTH.size))
            if not length:
                return None
            if length > LARGEST_FRAME:
                raise InvalidReply(f"an event of {length} bytes exceeds the limit of {LARGEST_FRAME} bytes")
            event = _EVENT.decode(await self._content.readexactly(length))
        except _BROKEN as error:
            raise ConnectionLost(_describe_error(error)) from error
        except _UNREADABLE as error:
            raise InvalidReply(f"cannot decode an event: {error}") from error
        if isinstance(event, Finished):
            await self._end()
        return event

    async def _end(self) -> None:
        """Read the end of the stream, so that its connection can be reused for the next order."""
        try:
            async with asyncio.timeout(ENDING):
                await self._content.readany()
        except _BROKEN:
            pass  # the result has arrived: the connection does not matter any more


def _require_open(session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
    if session is None or session.closed:
        raise ServerGone("the client is closed", "use it inside of `async with`")
    return session


def order_path(key: str, below: str = "") -> str:
    return f"/v1/orders/{quote(key, safe='')}{below}"


def decode_reply(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except _UNREADABLE as error:
        raise InvalidReply(f"cannot decode the body: {error}") from error


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status < 300:
        return
    problem = await _read_problem(response)
    if response.status in (401, 403):
        raise AccessRefused(problem)
    if response.status == 429:
        raise ServerBusy(problem)
    if response.status >= 500 and problem.code != "draining":
        raise ConnectionLost(f"{response.status} `{problem.code}`: {problem.message}", problem.after)
    raise OrderRefused(problem)


async def _read_problem(response: aiohttp.ClientResponse) -> ProblemDetails:
    body = await response.content.read(LARGEST_PROBLEM)
    try:
        packed = response.content_type == MSGPACK
        found = (
            msgspec.msgpack.decode(body, type=ProblemDetails)
            if packed
            else msgspec.json.decode(body, type=ProblemDetails)
        )
    except _UNREADABLE:
        found = ProblemDetails(code="unknown", message=f"{response.status} {response.reason}: {body[:500]!r}")
    after = response.headers.get("Retry-After", "")
    return found if found.after or not after.isdigit() else msgspec.structs.replace(found, after=float(after))


def _describe_error(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "the connection was closed before the end of the stream"
    return str(error) or type(error).__name__


def _body(content: bytes | None) -> io.BytesIO | None:
    """Return the content as a file that is sent in pieces, so that a large image does not block the loop."""
    return None if content is None else io.BytesIO(content)
