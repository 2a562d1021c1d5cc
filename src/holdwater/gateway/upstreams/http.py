"""The upstream for HTTP servers: one connection pool, retries before the first byte; it holds the API key.

`retry.py` decides the meaning of a status; the dialects parse the content.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from typing import NamedTuple, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ...core.errors import ModelFailed
from ...core.records import AttemptFailure, FailureOrigin, MiB
from ...dialect import DIALECTS
from ..body import BodyPayload
from . import UpstreamCall
from .retry import (
    HINT,
    LONGEST_WAIT,
    RATE_LIMITED,
    RETRIED_STATUSES,
    BreakerTripped,
    CircuitBreaker,
    UpstreamGate,
    choose_delay,
    failure_of,
    make_trip_failure,
)
from .scrubbing import ScrubbedStream, SecretScrubber

CONNECT_SECONDS = 30.0  # to open a connection
LARGEST_ERROR = 1 * MiB
LONGEST_HEADER = 64 * 1024
VERSION_HEADER = "X-Policy-Version"  # names the weights that answered
ERROR_SECONDS = 10.0  # to read the body of an error
DRAIN_SECONDS = 0.05  # seconds to read the rest of a complete answer; then the connection is closed

_WITHHELD_HEADERS = frozenset(
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


_VERSION = re.compile(r"/v\d+(alpha|beta)?\d*/?$")


class ProviderAddress(NamedTuple):
    """The address of a dialect: the base URL as the provider's own clients take it, and its key."""

    url: str  # with `/v1` for OpenAI's dialects; with or without a version for the others
    key: str | None = None
    bearer: bool = False  # send the key as a bearer token even if the dialect has its own header

    def build_base(self, dialect: str) -> str:
        """Return the URL below which the dialect's paths begin."""
        url = self.url if DIALECTS[dialect].provider.versioned else _VERSION.sub("", self.url)
        return url.rstrip("/") + "/"

    def build_headers(self, dialect: str) -> dict[str, str]:
        if self.key is None:
            return {}
        own = None if self.bearer else DIALECTS[dialect].key_header
        return {own: self.key} if own else {"Authorization": f"Bearer {self.key}"}


class HttpUpstream:
    """One URL for all dialects, or an address for each supported one; use it with `async with`."""

    def __init__(
        self,
        url: str | Mapping[str, ProviderAddress],
        key: str | None = None,
        *,
        retries: int = 4,
        stall: float = 600.0,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        addresses = dict.fromkeys(DIALECTS, ProviderAddress(url, key)) if isinstance(url, str) else dict(url)
        self.dialects = frozenset(addresses)
        self.counting = self.dialects
        self._bases = {dialect: address.build_base(dialect) for dialect, address in addresses.items()}
        self._keys = {dialect: address.build_headers(dialect) for dialect, address in addresses.items()}
        self.scrubber = SecretScrubber(address.key for address in addresses.values() if address.key)
        self._retries = retries
        self._stall = stall
        self._gate = UpstreamGate()
        self._breaker = breaker or CircuitBreaker()
        self._client: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._stall),
            trust_env=False,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._client is not None:
            await self._client.close()

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return self._gate.inside > 0

    def send(self, call: UpstreamCall) -> HttpCall:
        return HttpCall(self, call)

    async def open_answer(self, call: UpstreamCall) -> tuple[OpenedResponse, HttpAnswer]:
        """Return an answer as soon as its first byte is there; the caller must call `close`."""
        opened = await self._reach(call)
        try:
            call.body.free()
            judged = self._judge(call, opened)
            return opened, HttpAnswer(self, opened, self._pick_headers(opened.response), judged)
        except BaseException:  # boundary: releases, then raises again
            self.close(opened)
            raise

    def close(self, opened: OpenedResponse) -> None:
        opened.response.close()  # returns the connection to the pool if the answer has ended, else closes it
        self._gate.leave()

    async def _reach(self, call: UpstreamCall) -> OpenedResponse:
        try:
            return await self._send_with_retries(call)
        except ModelFailed as error:
            now = asyncio.get_running_loop().time()
            if self._breaker.record_failure(call.attempt, now):
                raise BreakerTripped(self._breaker.describe(now, error.message), HINT) from None
            raise

    async def _send_with_retries(self, call: UpstreamCall) -> OpenedResponse:
        """Return the first answer not to be retried, or the last one; it holds a slot of the gate."""
        tried = 0
        while True:
            tried += 1
            last = tried > self._retries
            try:
                opened = await self._send_once(call)
            except aiohttp.SocketTimeoutError:
                raise self.make_stall_error() from None
            except (aiohttp.ClientError, OSError) as error:
                if last or not call.body.at_hand:
                    raise self.make_error("unreachable", "the upstream cannot be reached", error) from None
                await asyncio.sleep(choose_delay(tried, {}))
                continue
            if last or not call.body.at_hand or not opened.may_be_tried_again:
                return opened
            opened.response.close()
            self._gate.leave()
            await _wait_to_retry(call, opened, tried)

    async def _send_once(self, call: UpstreamCall) -> OpenedResponse:
        entered = await self._gate.enter(call.waiting)
        try:
            response = await self._post(call)
            try:
                body = await self._read_error(response) if response.status >= 300 else None
            except BaseException:  # boundary: releases, then raises again
                response.close()
                raise
        except BaseException:  # boundary: releases, then raises again
            self._gate.leave()
            raise
        if response.status in RATE_LIMITED:
            self._gate.record_refusal(entered)
        elif body is None:
            self._gate.record_success()
        return OpenedResponse(response, body)

    async def _post(self, call: UpstreamCall) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside `async with`"
        headers = CIMultiDict(call.headers)
        headers["Accept-Encoding"] = "identity"
        headers.update(self._keys[call.dialect])
        url = _parse_url(self._bases[call.dialect] + call.path)
        return await self._client.post(
            url, data=BodyPayload(call.body), headers=headers, allow_redirects=False
        )

    def _pick_headers(self, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """Return the headers to forward to the client."""
        given = [item for item in response.headers.items() if item[0].lower() not in _WITHHELD_HEADERS]
        values = "\n".join([value for _, value in given])
        if self.scrubber.scrub_text(values) != values:
            given = [item for item in given if self.scrubber.scrub_text(item[1]) == item[1]]
        return CIMultiDict(given)

    def _judge(self, call: UpstreamCall, opened: OpenedResponse) -> AttemptFailure | None:
        """Return the failure that the answer means for the attempt, or for the run if the breaker trips."""
        failure = opened.failure
        if failure is None:
            self._breaker.record_success()
        elif failure.where is FailureOrigin.MODEL and failure.again:
            now = asyncio.get_running_loop().time()
            if self._breaker.record_failure(call.attempt, now):
                return make_trip_failure(self._breaker.describe(now, failure.message))
        return failure

    def make_stall_error(self) -> ModelFailed:
        return ModelFailed(f"the upstream was silent for {self._stall:g} s", kind="stall")

    def make_error(self, kind: str, what: str, error: BaseException) -> ModelFailed:
        reason = self.scrubber.scrub_text(str(error)) or type(error).__name__
        return ModelFailed(f"{what}: {reason}", "check the upstream's base URL", kind=kind)

    async def _read_error(self, response: aiohttp.ClientResponse) -> bytes:
        stream, body = ScrubbedStream(self.scrubber), b""
        try:
            async with asyncio.timeout(ERROR_SECONDS):
                while len(body) < LARGEST_ERROR and (piece := await response.content.readany()):
                    body += stream.feed(piece)
                if response.content.at_eof():
                    body += stream.flush()
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # the status says enough
        return body[:LARGEST_ERROR]


@lru_cache(maxsize=256)
def _parse_url(target: str) -> URL:
    """Return a cached URL, because a `URL` object caches its computed properties."""
    return URL(target, encoded=True)


class HttpCall:
    """A call and its answer, as a context. A class, because a generator costs more per call."""

    def __init__(self, upstream: HttpUpstream, call: UpstreamCall) -> None:
        self._upstream = upstream
        self._call: UpstreamCall | None = call

    async def __aenter__(self) -> HttpAnswer:
        call, self._call = self._call, None
        assert call is not None
        self._opened, answer = await self._upstream.open_answer(call)
        return answer

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                await _drain(self._opened.response)
        finally:
            self._upstream.close(self._opened)


class OpenedResponse:
    """A response whose headers have arrived; the body of an error is read whole to classify it."""

    def __init__(self, response: aiohttp.ClientResponse, body: bytes | None) -> None:
        self.response = response
        self.body = body
        self.failure = failure_of(response.status, response.headers, body) if body is not None else None

    @property
    def may_be_tried_again(self) -> bool:
        if self.failure is None or not self.failure.again or self.response.status not in RETRIED_STATUSES:
            return False
        if self.response.headers.get("x-should-retry", "").lower() == "false":
            return False
        return self.failure.after <= LONGEST_WAIT


class HttpAnswer:
    """A response of an HTTP server that is forwarded to the client."""

    waits = False
    original: bytes | None = None

    def __init__(
        self,
        upstream: HttpUpstream,
        opened: OpenedResponse,
        headers: CIMultiDict[str],
        failure: AttemptFailure | None,
    ) -> None:
        self.status = opened.response.status
        self.headers = headers
        self.failure = failure
        version = opened.response.headers.get(VERSION_HEADER)
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
            if rest := stream.flush():
                yield rest
        except aiohttp.SocketTimeoutError:
            raise self._upstream.make_stall_error() from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._upstream.make_error("cut", "the upstream's answer broke off", error) from None


async def _wait_to_retry(call: UpstreamCall, opened: OpenedResponse, tried: int) -> None:
    seconds = choose_delay(tried, opened.response.headers, opened.body or b"")
    if opened.response.status in RATE_LIMITED:
        with call.waiting():
            await asyncio.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


async def _drain(response: aiohttp.ClientResponse) -> None:
    """Read the rest of an answer if it has already arrived, so that its connection can be reused."""
    if response.content.at_eof():
        return
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            while await response.content.readany():
                pass
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass  # the connection is closed instead
