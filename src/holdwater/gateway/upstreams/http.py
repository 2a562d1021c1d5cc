"""The upstream that is an HTTP server: one connection pool, retries before the first byte, the key kept here.

What a status means is decided in `retry.py`; what is in the answer is for the dialects.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ...core.errors import ModelFailed
from ...core.records import Failure, MiB, Where
from ..body import Payload
from . import Call
from .breaker import HINT, Breaker, Tripped, tripped
from .gate import Gate
from .retry import AGAIN, LONGEST_WAIT, RATE_LIMITED, delay, failure_of
from .scrubbing import ScrubbedStream, SecretScrubber

CONNECT = 30.0  # seconds for a connection
LARGEST_ERROR = 1 * MiB
LONGEST_HEADER = 64 * 1024
VERSION = "X-Policy-Version"  # the header in which an upstream says which weights answered
ERROR_SECONDS = 10.0  # for the body of an error
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


OPENAI = frozenset({"chat", "responses", "completions", "embeddings"})
DIALECTS = OPENAI | {"messages", "gemini"}
_KEY_HEADERS = {"messages": "x-api-key", "gemini": "x-goog-api-key"}  # a bearer's elsewhere
_VERSION = re.compile(r"/v\d+(alpha|beta)?\d*/?$")


class Address(NamedTuple):
    """Where a dialect is spoken: the base URL as that provider's own clients take it, and the key for it."""

    url: str  # with `/v1` for OpenAI's dialects; with or without a version for the others
    key: str | None = None
    bearer: bool = False  # the key is sent as a bearer's, also where the dialect has a header of its own

    def base(self, dialect: str) -> str:
        """Where the dialect's paths begin."""
        url = self.url if dialect in OPENAI else _VERSION.sub("", self.url)
        return url.rstrip("/") + "/"

    def headers(self, dialect: str) -> dict[str, str]:
        if self.key is None:
            return {}
        own = None if self.bearer else _KEY_HEADERS.get(dialect)
        return {own: self.key} if own else {"Authorization": f"Bearer {self.key}"}


class HttpUpstream:
    """One URL that is asked in every dialect, or an address for each that it speaks; used by `async with`."""

    def __init__(
        self,
        url: str | Mapping[str, Address],
        key: str | None = None,
        *,
        retries: int = 4,
        stall: float = 600.0,
        breaker: Breaker | None = None,
    ) -> None:
        addresses = dict.fromkeys(DIALECTS, Address(url, key)) if isinstance(url, str) else dict(url)
        self.dialects = frozenset(addresses)
        self.counts = True
        self._bases = {dialect: address.base(dialect) for dialect, address in addresses.items()}
        self._keys = {dialect: address.headers(dialect) for dialect, address in addresses.items()}
        self.scrubber = SecretScrubber(address.key for address in addresses.values() if address.key)
        self._retries = retries
        self._stall = stall
        self._gate = Gate()
        self._breaker = breaker or Breaker()
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

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return self._gate.inside > 0

    def send(self, call: Call) -> Sending:
        return Sending(self, call)

    async def opened(self, call: Call) -> tuple[Opened, HttpAnswer]:
        """An answer from its first byte on; `close` follows."""
        opened = await self._reached(call)
        try:
            call.body.free()
            judged = self._judged(call, opened)
            return opened, HttpAnswer(self, opened, self._returned(opened.response), judged)
        except BaseException:  # boundary: given back, then raised again
            self.close(opened)
            raise

    def close(self, opened: Opened) -> None:
        opened.response.close()  # returns a connection whose answer has ended to the pool, closes any other
        self._gate.leave()

    async def _reached(self, call: Call) -> Opened:
        try:
            return await self._tried(call)
        except ModelFailed as error:
            now = asyncio.get_running_loop().time()
            if self._breaker.failed(call.attempt, now):
                raise Tripped(self._breaker.message(now, error.message), HINT) from None
            raise

    async def _tried(self, call: Call) -> Opened:
        """The first answer that is not to be tried again, or the last one; it has a place in the gate."""
        tried = 0
        while True:
            tried += 1
            last = tried > self._retries
            try:
                opened = await self._once(call)
            except aiohttp.SocketTimeoutError:
                raise self.silent() from None
            except (aiohttp.ClientError, OSError) as error:
                if last or not call.body.at_hand:
                    raise self.failed("unreachable", "the upstream cannot be reached", error) from None
                await asyncio.sleep(delay(tried, {}))
                continue
            if last or not call.body.at_hand or not opened.may_be_tried_again:
                return opened
            opened.response.close()
            self._gate.leave()
            await _wait(call, opened, tried)

    async def _once(self, call: Call) -> Opened:
        entered = await self._gate.enter(call.waiting)
        try:
            response = await self._post(call)
            try:
                body = await self._read_error(response) if response.status >= 300 else None
            except BaseException:  # boundary: given back, then raised again
                response.close()
                raise
        except BaseException:  # boundary: given back, then raised again
            self._gate.leave()
            raise
        if response.status in RATE_LIMITED:
            self._gate.refused(entered)
        elif body is None:
            self._gate.served()
        return Opened(response, body)

    async def _post(self, call: Call) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside `async with`"
        headers = CIMultiDict(call.headers)
        headers["Accept-Encoding"] = "identity"
        headers.update(self._keys[call.dialect])
        url = _url(self._bases[call.dialect] + call.path)
        return await self._client.post(url, data=Payload(call.body), headers=headers, allow_redirects=False)

    def _returned(self, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """The headers that may go on to the client."""
        given = [item for item in response.headers.items() if item[0].lower() not in _NOT_RETURNED]
        values = "\n".join([value for _, value in given])
        if self.scrubber.scrub_text(values) != values:
            given = [item for item in given if self.scrubber.scrub_text(item[1]) == item[1]]
        return CIMultiDict(given)

    def _judged(self, call: Call, opened: Opened) -> Failure | None:
        """What the answer means for the attempt, or by now for the run."""
        failure = opened.failure
        if failure is None:
            self._breaker.succeeded()
        elif failure.where is Where.MODEL and failure.again:
            now = asyncio.get_running_loop().time()
            if self._breaker.failed(call.attempt, now):
                return tripped(self._breaker.message(now, failure.message))
        return failure

    def silent(self) -> ModelFailed:
        return ModelFailed(f"the upstream was silent for {self._stall:g} s", kind="stall")

    def failed(self, kind: str, what: str, error: BaseException) -> ModelFailed:
        reason = self.scrubber.scrub_text(str(error)) or type(error).__name__
        return ModelFailed(f"{what}: {reason}", "check the upstream's base URL", kind=kind)

    async def _read_error(self, response: aiohttp.ClientResponse) -> bytes:
        stream, body = ScrubbedStream(self.scrubber), b""
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                while len(body) < LARGEST_ERROR and (piece := await response.content.readany()):
                    body += stream.feed(piece)
                if response.content.at_eof():
                    body += stream.rest()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # the status says enough
        return body[:LARGEST_ERROR]


@lru_cache(maxsize=256)
def _url(target: str) -> URL:
    """Kept, because a URL keeps what it is asked each time."""
    return URL(target, encoded=True)


class Sending:
    """A call and its answer, as a context. A class: a generator costs more a call."""

    def __init__(self, upstream: HttpUpstream, call: Call) -> None:
        self._upstream = upstream
        self._call: Call | None = call

    async def __aenter__(self) -> HttpAnswer:
        call, self._call = self._call, None
        assert call is not None
        self._opened, answer = await self._upstream.opened(call)
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await _finish(self._opened.response)
        finally:
            self._upstream.close(self._opened)


class Opened:
    """An answer whose headers are there; that of an error is read whole, to see what it means."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes | None) -> None:
        self.response = response
        self.body = body
        self.failure = failure_of(response.status, response.headers, body) if body is not None else None

    @property
    def may_be_tried_again(self) -> bool:
        if self.failure is None or not self.failure.again or self.response.status not in AGAIN:
            return False
        if self.response.headers.get("x-should-retry", "").lower() == "false":
            return False
        return self.failure.after <= LONGEST_WAIT


class HttpAnswer:
    """An answer of an HTTP server on its way to the client."""

    waits = False

    def __init__(
        self, upstream: HttpUpstream, opened: Opened, headers: CIMultiDict[str], failure: Failure | None
    ) -> None:
        self.status = opened.response.status
        self.headers = headers
        self.failure = failure
        version = opened.response.headers.get(VERSION)
        self.version = upstream.scrubber.scrub_text(version) if version is not None else None
        self._upstream = upstream
        self._content = opened.response.content
        self._body = opened.body

    async def pieces(self) -> AsyncIterator[bytes]:
        if self._body is not None:
            yield self._body
            return
        stream = ScrubbedStream(self._upstream.scrubber)
        try:
            while piece := await self._content.readany():
                if clean := stream.feed(piece):
                    yield clean
            if rest := stream.rest():
                yield rest
        except aiohttp.SocketTimeoutError:
            raise self._upstream.silent() from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._upstream.failed("cut", "the upstream's answer broke off", error) from None


async def _wait(call: Call, opened: Opened, tried: int) -> None:
    seconds = delay(tried, opened.response.headers, opened.body or b"")
    if opened.response.status in RATE_LIMITED:
        with call.waiting():
            await asyncio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


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
