"""HTTP requests to one registry, with authorization, pacing, redirects and retries.

Credentials are never sent to another host. Each request returns an expected response or raises a
`RegistryRefusal`. `client.py` defines the requests.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import aiohttp
from yarl import URL

from ...core.failures import double_delay
from ...core.image import Note, RegistryOptions
from ...core.records import Record
from .blob_stream import BlobStream, read_body
from .credentials import RegistryCredentials
from .reference import api_host, is_loopback
from .refusal import LARGEST_ERROR, RegistryRefusal, parse_refusal, unreached_error
from .tokens import RegistryAuth, Scopes

_BURST = 2.0  # seconds of the rate that may be used at once
T = TypeVar("T")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_MOST_SENT = 3  # without a token, with an expired token, with a new token
_NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)


class RegistryRetryPolicy(Record, frozen=True):
    """How often and how long one operation is retried."""

    tries: int = 6
    first: float = 0.25  # seconds before the second attempt; doubles, with jitter
    longest: float = 15.0
    pause: float = 120.0  # seconds: a longer Retry-After counts as a refusal
    waiting: float = 600.0  # seconds of pauses in one operation
    stall: float = 300.0  # seconds without a byte in either direction; storing a large blob takes long

    def delay(self, tried: int) -> float:
        """Return the seconds to wait after `tried` attempts."""
        return double_delay(self.first, tried, self.longest) * random.uniform(0.5, 1.5)


class RequestPace:
    """The pace of requests to one registry. Create it in a running event loop."""

    def __init__(self, requests_a_minute: float | None) -> None:
        self._clock = asyncio.get_running_loop().time
        self._gap = 60.0 / requests_a_minute if requests_a_minute else 0.0
        self._ahead = max(0.0, _BURST - self._gap)
        self._next = 0.0  # time of the next request's turn
        self._until = 0.0  # no request is sent before this time

    def pause(self, seconds: float) -> None:
        """Pause all requests. A longer pause that is already set stays."""
        self._until = max(self._until, self._clock() + seconds)

    async def wait_turn(self, patience: RegistryRetryPolicy) -> float:
        """Wait until a request may be sent and return 0.0; return the pause if it exceeds the policy."""
        if self._gap:
            now = self._clock()
            mine = max(self._next, now - self._ahead)
            self._next = mine + self._gap
            if mine > now:
                await asyncio.sleep(mine - now)
        latest = self._clock() + patience.waiting
        while (seconds := self._until - self._clock()) > 0.0:
            if seconds > patience.pause or self._until > latest:
                return seconds
            await asyncio.sleep(seconds * random.uniform(1.0, 1.1))  # do not resume all requests at once
        return 0.0


class RegistryRequest(NamedTuple):
    """One request. `what` begins the error message: `the manifest of ... cannot be read`."""

    method: str
    path: str  # below `/v2/`, or a full URL
    what: str
    scopes: Scopes
    headers: Mapping[str, str] = {}
    body: bytes | BlobStream | None = None  # a stream can be sent only once


class RegistryResponse(NamedTuple):
    """A small response with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: URL


class RegistryHost:
    """The connection to one registry. Create it in a running event loop; the caller owns the session."""

    def __init__(
        self,
        registry: str,
        settings: RegistryOptions,
        session: aiohttp.ClientSession,
        credentials: RegistryCredentials,
        note: Note,
        patience: RegistryRetryPolicy,
    ) -> None:
        host = api_host(registry)
        scheme = "http" if settings.insecure or is_loopback(host) else "https"
        self.registry = registry
        self.note = note
        self._base = URL(f"{scheme}://{host}")
        self._root = f"{scheme}://{host}/v2/"
        self._session = session
        self._retry_policy = patience
        self._pace = RequestPace(settings.requests_a_minute)
        self._auth = RegistryAuth(registry, self._base, credentials, session)
        self._clock = asyncio.get_running_loop().time

    async def retry(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `operation`; retry it as the error and the retry policy allow."""
        tried, limited, waited = 0, 0, 0.0
        while True:
            try:
                return await operation()
            except RegistryRefusal as error:
                if not error.again or error.spent:
                    raise
                tried, limited = (tried, limited + 1) if error.kind == "rate" else (tried + 1, limited)
                seconds = error.after or self._retry_policy.delay(tried + limited)
                waited += seconds
                error.spent = tried >= self._retry_policy.tries or waited > self._retry_policy.waiting
                paused = error.after > 0.0 or error.kind == "rate"
                if paused:
                    self._pace.pause(seconds)
                if error.spent:
                    error.after = seconds if paused else 0.0
                    raise
                self.note(f"registry.{error.kind}", error.message)
            if not paused:  # `RequestPace.wait_turn` waits for a pause, together with all other requests
                await asyncio.sleep(seconds)

    async def send(
        self, ask: RegistryRequest, expected: frozenset[int], most: int = LARGEST_ERROR
    ) -> RegistryResponse:
        """Send one request; return the whole response of at most `most` bytes."""
        response = await self.open(ask, expected)
        failure, body = None, b""
        try:
            body = await read_body(response, most)
        except _NETWORK_ERRORS as error:
            failure = self._network_error(ask, error)
        finally:
            response.close()  # a response read to its end has already returned its connection to the pool
        if len(body) > most:
            failure = unreached_error(ask.what, f"the response has more than {most} bytes", again=False)
        if failure is not None:
            raise failure
        return RegistryResponse(response.status, response.headers, body, response.url)

    async def open(self, ask: RegistryRequest, expected: frozenset[int]) -> aiohttp.ClientResponse:
        """Send one request; return the response with its body unread. The caller closes it."""
        try:
            response = await self._send_signed(ask)
            if response.status in expected:
                return response
            failure = await self._read_refusal(ask, response)
        except _NETWORK_ERRORS as error:
            failure = self._network_error(ask, error)
        raise failure

    def resolve_location(self, location: str, base: URL) -> URL:
        """Return the URL of a `Location`. Plain HTTP to an HTTPS registry itself becomes HTTPS."""
        url = base.join(URL(location, encoded=True))
        if (
            self._base.scheme == "https"
            and url.scheme == "http"
            and _origin(url)[1] == _origin(self._base)[1]
        ):
            url = url.with_scheme("https").with_port(self._base.explicit_port)
        return url

    async def _send_signed(self, ask: RegistryRequest) -> aiohttp.ClientResponse:
        url = URL(ask.path if "://" in ask.path else self._root + ask.path, encoded=True)
        for asked in range(1, _MOST_SENT + 1):
            if too_long := await self._pace.wait_turn(self._retry_policy):
                raise self._pause_error(ask, too_long)
            header = await self._auth.header(ask.scopes) if self._is_own(url) else None
            response = await self._follow_redirects(ask, url, header)
            if response.status != 401 or asked == _MOST_SENT or not self._is_own(response.url):
                break
            wanted = response.headers.getall("WWW-Authenticate", ())
            if not await self._auth.accept_challenge(ask.scopes, header, wanted):
                break
            response.release()
            if isinstance(ask.body, BlobStream):
                raise unreached_error(ask.what, "the token expired during the upload")
        return response

    async def _follow_redirects(
        self, ask: RegistryRequest, url: URL, header: str | None
    ) -> aiohttp.ClientResponse:
        """Send a request and follow redirects, which are only followed for GET and HEAD."""
        for _ in range(_MOST_REDIRECTS):
            response = await self._send_once(ask, url, header if self._is_own(url) else None)
            target = response.headers.get("Location")
            if response.status not in _REDIRECTS or ask.method not in ("GET", "HEAD") or not target:
                return response
            response.release()
            url = self.resolve_location(target, url)
        raise unreached_error(ask.what, f"more than {_MOST_REDIRECTS} redirects")

    async def _send_once(self, ask: RegistryRequest, url: URL, header: str | None) -> aiohttp.ClientResponse:
        headers = {**ask.headers, "Authorization": header} if header else ask.headers
        data = io.BytesIO(ask.body) if isinstance(ask.body, bytes) else ask.body
        async with asyncio.timeout(self._retry_policy.stall) as limit:
            if isinstance(ask.body, BlobStream):
                ask.body.on_piece = lambda: limit.reschedule(self._clock() + self._retry_policy.stall)
            return await self._session.request(
                ask.method, url, headers=headers, data=data, allow_redirects=False
            )

    def _is_own(self, url: URL) -> bool:
        return _origin(url) == _origin(self._base)

    async def _read_refusal(self, ask: RegistryRequest, response: aiohttp.ClientResponse) -> RegistryRefusal:
        try:
            body = await read_body(response, LARGEST_ERROR)
        finally:
            response.close()  # a response read to its end has already returned its connection to the pool
        text = (await self._auth.scrub_secrets(body.decode(errors="replace"))).encode()
        if self._is_own(response.url) or response.status == 429 or response.status >= 500:
            return parse_refusal(ask.what, response.status, response.headers, text)
        # The status of another host, reached by a redirect, says nothing about the image.
        return unreached_error(ask.what, f"`{response.url.host}` answered {response.status}")

    def _pause_error(self, ask: RegistryRequest, seconds: float) -> RegistryRefusal:
        why = f"`{self.registry}` requires a pause of {seconds:.0f} s"
        failure = RegistryRefusal(f"{ask.what}: {why}", kind="rate", after=seconds)
        failure.spent = True
        return failure

    def _network_error(self, ask: RegistryRequest, error: BaseException) -> RegistryRefusal:
        if isinstance(ask.body, BlobStream) and ask.body.failure is not None:
            return ask.body.failure
        if isinstance(error, aiohttp.ClientSSLError):
            hint = "set `insecure` for a registry that uses plain HTTP"
            return unreached_error(ask.what, str(error), again=False, hint=hint)
        if isinstance(error, TimeoutError):
            return unreached_error(
                ask.what, f"`{self.registry}` sent no data for {self._retry_policy.stall:g} s"
            )
        return unreached_error(ask.what, f"`{self.registry}`: {_describe_error(error)}")


def _origin(url: URL) -> tuple[str, str, int | None]:
    return url.scheme, (url.host or "").lower(), url.port


def _describe_error(error: BaseException) -> str:
    """Return the error's text without aiohttp's details of the request, which include the headers."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"invalid response: {error.message}"
    return str(error) or type(error).__name__
