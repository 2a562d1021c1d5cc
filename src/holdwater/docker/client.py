"""The docker engine's API over its unix socket or TCP: requests, responses, streams, and the daemon's death.

It makes no decisions. `versions.py` knows which parameters a daemon supports; builds use the `docker`
command, in `build.py`.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from ..core.errors import HoldwaterError
from .versions import NEWEST, OLDEST, ApiVersion, negotiate_version

DEFAULT_HOST = "unix:///var/run/docker.sock"
PATIENCE = 120.0  # seconds for a response: a busy daemon takes long to compute its disk usage
SILENCE = 600.0  # seconds without a byte in a stream: unpacking a large layer sends no progress
LONGEST_LINE = 16 * 1024 * 1024

HEADER_SIZE = 8  # bytes: stream number, three zeros, length in network order
STDERR = 2

RECONNECT_PAUSE = 0.2  # seconds before a new connection attempt
NO_EVENTS = '{"event": ["none"]}'  # a filter that matches no event


class DockerError(HoldwaterError):
    """The daemon refused a request."""

    def __init__(self, message: str, hint: str = "", *, status: int = 0) -> None:
        super().__init__(message, hint)
        self.status = status


class DaemonGone(DockerError):
    """The daemon did not respond, or the connection broke."""


class DockerClient:
    """A connection to one daemon, with the newest API version that both sides support."""

    def __init__(self, host: str = DEFAULT_HOST) -> None:
        self.host = host
        self.api: ApiVersion = NEWEST
        kind, _, place = host.partition("://")
        self.socket = place if kind == "unix" else ""
        if not place or kind not in ("unix", "tcp"):
            raise DockerError(
                f"invalid address of a docker daemon: `{host}`", "use `unix:///path` or `tcp://host:port`"
            )
        self._url = URL("http://docker") if self.socket else URL(f"http://{place}")
        self._session: aiohttp.ClientSession | None = None
        self.lost_at = -math.inf  # when the daemon was last found dead, in `time.monotonic` seconds

    async def __aenter__(self) -> DockerClient:
        # Each command that runs in a container holds a connection: the callers bound their number.
        unix = bool(self.socket)
        connector = (
            aiohttp.UnixConnector(path=self.socket, limit=0) if unix else aiohttp.TCPConnector(limit=0)
        )
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._open_request("GET", "/version", {}, {}, PATIENCE) as answer:
                told = msgspec.json.decode(await answer.read())
            self.api = self._negotiate(told)
        except BaseException:  # boundary: given back, then raised again
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, query: Mapping[str, str] | None = None, seconds: float = PATIENCE) -> Any:
        return await self._call("GET", path, query, seconds=seconds)

    async def post(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        seconds: float = PATIENCE,
    ) -> Any:
        return await self._call("POST", path, query, body, seconds)

    async def delete(
        self, path: str, query: Mapping[str, str] | None = None, seconds: float = PATIENCE
    ) -> Any:
        return await self._call("DELETE", path, query, seconds=seconds)

    async def head(self, path: str, query: Mapping[str, str], seconds: float = PATIENCE) -> Mapping[str, str]:
        """Send a HEAD request; return the headers of the response."""
        async with self._open_request("HEAD", self._path(path), query, {}, seconds) as answer:
            return answer.headers

    async def upload(
        self, path: str, query: Mapping[str, str], content: bytes | AsyncIterable[bytes], seconds: float
    ) -> None:
        """PUT a tar archive."""
        kind = {"Content-Type": "application/x-tar"}
        async with self._open_request("PUT", self._path(path), query, kind, seconds, content) as answer:
            await answer.read()

    @asynccontextmanager
    async def open_body(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        silence: float | None = SILENCE,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request; yield the pieces of its response.

        The response is an archive, or the output of a command (`FrameDecoder`). `silence`: seconds without a
        byte after which the daemon counts as gone; None: no limit.
        """
        headers, data = _encode_body(body)
        asked = self._open_request(method, self._path(path), query or {}, headers, None, data, silence)
        async with asked as answer:
            yield answer.content.iter_any()

    async def get_or_none(self, path: str) -> Any | None:
        """Return the result of `get`, or None if the daemon responds with 404."""
        try:
            return await self.get(path)
        except DockerError as error:
            if error.status == 404:
                return None
            raise

    async def stream(
        self, path: str, query: Mapping[str, str], headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages of a long POST; an error message is raised as a `DockerError`."""
        async with self._open_request("POST", self._path(path), query, headers or {}, None) as answer:
            async for line in _read_lines(answer):
                message: dict[str, Any] = msgspec.json.decode(line)
                if told := message.get("error") or message.get("errorDetail"):
                    raise DockerError(told if isinstance(told, str) else str(told.get("message", told)))
                yield message

    def find_peer(self) -> int | None:
        """Return the pid of the process that listens on the socket; None if unknown."""
        if not self.socket:
            return None
        with socket.socket(socket.AF_UNIX) as one:
            try:
                one.connect(self.socket)
            except OSError as error:
                raise self._make_gone_error(error) from error
            size = struct.calcsize("3i")
            pid, _, _ = struct.unpack("3i", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return pid or None  # 0: the process is in a namespace that is not visible from here

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None = None,
        seconds: float = PATIENCE,
    ) -> Any:
        headers, data = _encode_body(body)
        async with self._open_request(
            method, self._path(path), query or {}, headers, seconds, data
        ) as answer:
            content = await answer.read()
        return msgspec.json.decode(content) if content.strip() else None

    @asynccontextmanager
    async def _open_request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        seconds: float | None,
        data: bytes | AsyncIterable[bytes] | None = None,
        silence: float | None = SILENCE,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._session is not None, "the client is used outside of its `async with`"
        timeout = aiohttp.ClientTimeout(total=seconds, sock_read=None if seconds else silence)
        url = self._url.join(URL(path, encoded=True)).update_query(query)
        asked = self._session.request(method, url, headers=headers, timeout=timeout, data=data)
        try:
            async with asked as answer:
                if answer.status >= 400:
                    raise DockerError(_parse_message(await answer.read()), status=answer.status)
                yield answer
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._make_gone_error(error) from error

    def _path(self, path: str) -> str:
        return f"/v{self.api[0]}.{self.api[1]}{path}"

    def _negotiate(self, told: Mapping[str, Any]) -> ApiVersion:
        newest, oldest = str(told.get("ApiVersion", "")), str(told.get("MinAPIVersion", ""))
        agreed = negotiate_version(newest, oldest) if newest else None
        if agreed is None:
            wanted = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
            raise DockerError(f"unsupported docker API {oldest} to {newest} (need {wanted}): `{self.host}`")
        return agreed

    def mark_lost(self) -> None:
        """Record that the daemon has died."""
        self.lost_at = time.monotonic()

    def _make_gone_error(self, error: BaseException) -> DaemonGone:
        if not isinstance(error, TimeoutError):  # a slow daemon is not dead
            self.mark_lost()
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, aiohttp.ClientConnectorError):
            cause = error.os_error.strerror or cause
        return DaemonGone(
            f"the docker daemon does not answer: `{self.host}`: {cause}",
            "is it running, and may this user reach it?",
        )


def _encode_body(body: Mapping[str, Any] | None) -> tuple[dict[str, str], bytes | None]:
    if body is None:
        return {}, None
    return {"Content-Type": "application/json"}, msgspec.json.encode(body)


async def _read_lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pending = b""
    async for piece in answer.content.iter_any():
        *whole, pending = (pending + piece).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(pending) > LONGEST_LINE:
            raise DockerError(f"the daemon sent a line of more than {LONGEST_LINE} bytes")
    if pending.strip():
        yield pending


def _parse_message(content: bytes) -> str:
    try:
        return str(msgspec.json.decode(content)["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return content[:500].decode("utf-8", "replace")


class FrameDecoder:
    """Splits the byte stream into frames; content is passed on before its frame is complete."""

    def __init__(self) -> None:
        self._head = bytearray()  # at most `HEADER_SIZE` bytes
        self._left = 0  # bytes left of the current frame
        self._stream = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the stream number and the content of each part in `piece`."""
        at = 0
        while at < len(piece):
            if self._left == 0:
                taken = piece[at : at + HEADER_SIZE - len(self._head)]
                self._head += taken
                at += len(taken)
                if len(self._head) < HEADER_SIZE:
                    return
                self._stream, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
                self._head.clear()
                continue
            content = piece[at : at + self._left]
            at += len(content)
            self._left -= len(content)
            yield self._stream, content


class DaemonWatch:
    """Watches a client's daemon while it is open; `client.lost_at` is the time of the daemon's death.

    An open connection ends with the daemon, even if it restarts at once: a service manager may keep its
    socket, so that no request fails although its containers are gone.
    """

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._following: asyncio.Task[None] | None = None  # awaited by `__aexit__`

    async def __aenter__(self) -> DaemonWatch:
        self._following = asyncio.ensure_future(self._follow())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

    def make_death_check(self) -> Callable[[], bool]:
        """Return a function that says whether the daemon has died since this call."""
        began = time.monotonic()
        return lambda: self._client.lost_at >= began

    async def _follow(self) -> None:
        while True:
            try:
                query = {"filters": NO_EVENTS}
                async with self._client.open_body("GET", "/events", query, silence=None) as pieces:
                    async for _ in pieces:
                        pass
                self._client.mark_lost()
            except DockerError:
                pass  # the client has recorded it
            await asyncio.sleep(RECONNECT_PAUSE)
