"""The upstream that is an HTTP server: one connection pool, retries before the first byte, the key kept here.

What a status means is decided in `retry.py`; what is in the answer is for the dialects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import aiohttp
from multidict import CIMultiDict

from ...core.errors import ModelFailed
from ...core.records import Failure, MiB
from ..body import Payload
from . import Call
from .retry import AGAIN, LONGEST_WAIT, RATE_LIMITED, delay, failure_of, retry_after

CONNECT = 30.0  # seconds for a connection
LARGEST_ERROR = 1 * MiB
LONGEST_HEADER = 64 * 1024
LEFTOVER = 0.05  # seconds for the end of an answer whose meaning has ended; then its connection is closed

_NOT_RETURNED = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "content-encoding",
        "set-cookie",
        "date",
        "server",
        "alt-svc",
    }
)


class HttpUpstream:
    """`url` ends where the dialects' paths begin (`.../v1`). Used with `async with`."""

    def __init__(self, url: str, key: str | None, *, retries: int = 4, stall: float = 600.0) -> None:
        self._url = url.rstrip("/") + "/"
        self._key = key
        self._secret = key.encode() if key else b""
        self._retries = retries
        self._stall = stall
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=self._stall),
            trust_env=False,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[HttpAnswer]:
        response = await self._tried(call)
        try:
            call.body.free()
            answer = await self._answer(response)
            del call
            yield answer
            await _finish(response)
        finally:
            response.close()  # returns a connection whose answer has ended to the pool, and closes any other

    async def _tried(self, call: Call) -> aiohttp.ClientResponse:
        """The first answer that is not to be tried again, or the last one."""
        tried = 0
        while True:
            tried += 1
            last = tried > self._retries
            try:
                response = await self._post(call)
            except aiohttp.SocketTimeoutError:
                raise self.silent() from None
            except (aiohttp.ClientError, OSError) as error:
                if last or not call.body.at_hand:
                    raise self.failed("unreachable", "the upstream cannot be reached", error) from None
                await asyncio.sleep(delay(tried, {}))
                continue
            if last or not call.body.at_hand or not _may_try_again(response):
                return response
            await self._wait(call, response, tried)

    async def _post(self, call: Call) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside `async with`"
        headers = CIMultiDict(call.headers)
        headers["Accept-Encoding"] = "identity"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        return await self._client.post(
            self._url + call.path, data=Payload(call.body), headers=headers, allow_redirects=False
        )

    async def _wait(self, call: Call, response: aiohttp.ClientResponse, tried: int) -> None:
        await _finish(response)
        response.close()
        seconds = delay(tried, response.headers)
        if response.status in RATE_LIMITED:
            with call.waiting():
                await asyncio.sleep(seconds)
        else:
            await asyncio.sleep(seconds)

    async def _answer(self, response: aiohttp.ClientResponse) -> HttpAnswer:
        headers = CIMultiDict(
            (name, value)
            for name, value in response.headers.items()
            if name.lower() not in _NOT_RETURNED and not (self._key and self._key in value)
        )
        if response.status < 300:
            return HttpAnswer(self, response, headers)
        body = self.scrubbed(await _read_error(response))
        return HttpAnswer(self, response, headers, body)

    def silent(self) -> ModelFailed:
        return ModelFailed(f"the upstream was silent for {self._stall:g} s", kind="stall")

    def failed(self, kind: str, what: str, error: BaseException) -> ModelFailed:
        reason = self.scrubbed(str(error).encode()).decode() or type(error).__name__
        return ModelFailed(f"{what}: {reason}", "check the upstream's base URL", kind=kind)

    def scrubbed(self, text: bytes) -> bytes:
        return text.replace(self._secret, b"[key]") if self._secret and self._secret in text else text


class HttpAnswer:
    """An answer of an HTTP server. That of an error is read whole, to see what it means."""

    def __init__(
        self,
        upstream: HttpUpstream,
        response: aiohttp.ClientResponse,
        headers: CIMultiDict[str],
        body: bytes | None = None,
    ) -> None:
        self.status = response.status
        self.headers = headers
        self.failure: Failure | None = None if body is None else failure_of(self.status, headers, body)
        self._upstream = upstream
        self._content = response.content
        self._body = body

    async def pieces(self) -> AsyncIterator[bytes]:
        if self._body is not None:
            yield self._body
            return
        try:
            while piece := await self._content.readany():
                yield self._upstream.scrubbed(piece)
        except aiohttp.SocketTimeoutError:
            raise self._upstream.silent() from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._upstream.failed("cut", "the upstream's answer broke off", error) from None


def _may_try_again(response: aiohttp.ClientResponse) -> bool:
    if response.status not in AGAIN or response.headers.get("x-should-retry", "").lower() == "false":
        return False
    return (retry_after(response.headers) or 0.0) <= LONGEST_WAIT


async def _read_error(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    try:
        while len(body) < LARGEST_ERROR and (piece := await response.content.readany()):
            body += piece
    except (aiohttp.ClientError, OSError):
        pass  # the status says enough
    return body[:LARGEST_ERROR]


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read what is left of an answer if it is there already, so that its connection can be used again."""
    if response.content.at_eof():
        return
    try:
        async with asyncio.timeout(LEFTOVER):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # its connection is closed instead
