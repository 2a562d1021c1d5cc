"""One HTTP server of models: its addresses and keys, its connection pool, and its limit on concurrent calls.

It sends a call once. `http.py` decides about retries, `endpoint_choice.py` which server gets a call.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from ...core.errors import ModelFailed
from ...core.records import FailureOrigin, MiB
from ...dialect import DIALECTS
from ..body import BodyPayload
from . import UpstreamCall
from .endpoint_health import EndpointHealth
from .retry import LONGEST_WAIT, RATE_LIMITED, RETRIED_STATUSES, UpstreamGate, failure_of
from .scrubbing import ScrubbedStream, SecretScrubber

CONNECT_SECONDS = 30.0  # to open a connection
LARGEST_ERROR = 1 * MiB
LONGEST_HEADER = 64 * 1024
ERROR_SECONDS = 10.0  # to read the body of an error

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


class EndpointTerms(NamedTuple):
    """A server of models as the user describes it."""

    addresses: Mapping[str, ProviderAddress]  # by dialect
    weight: float = 1.0  # its share of the calls, relative to the others
    models: tuple[str, ...] = ()  # patterns of the only models that it serves; empty: it serves all others


class HttpEndpoint:
    """One server: `async with HttpEndpoint(terms, stall)`."""

    def __init__(self, terms: EndpointTerms, stall: float) -> None:
        addresses = terms.addresses
        self.terms = terms
        self.url = next((address.url for address in addresses.values()), "")
        self.dialects = frozenset(addresses)
        self.health = EndpointHealth()
        self._bases = {dialect: address.build_base(dialect) for dialect, address in addresses.items()}
        self._keys = {dialect: address.build_headers(dialect) for dialect, address in addresses.items()}
        self.scrubber = SecretScrubber(address.key for address in addresses.values() if address.key)
        self.gate = UpstreamGate()
        self._stall = stall
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

    def close(self, opened: OpenedResponse) -> None:
        opened.response.close()  # returns the connection to the pool if the answer has ended, else closes it
        self._leave()

    def _leave(self) -> None:
        self.gate.leave()
        self.health.leave()

    async def send_once(self, call: UpstreamCall) -> OpenedResponse:
        """Send the call; return the response with its headers. The caller must call `close`."""
        entered = await self.gate.enter(call.waiting)
        self.health.enter()
        try:
            response = await self._post(call)
            try:
                body = await self._read_error(response) if response.status >= 300 else None
            except BaseException:  # boundary: releases, then raises again
                response.close()
                raise
        except BaseException:  # boundary: releases, then raises again
            self._leave()
            raise
        if response.status in RATE_LIMITED:
            self.gate.record_refusal(entered)
        elif body is None:
            self.gate.record_success()
        return OpenedResponse(self, response, body, entered)

    async def _post(self, call: UpstreamCall) -> aiohttp.ClientResponse:
        assert self._client is not None, "used outside `async with`"
        headers = CIMultiDict(call.headers)
        headers["Accept-Encoding"] = "identity"
        headers.update(self._keys[call.dialect])
        url = _parse_url(self._bases[call.dialect] + call.path)
        return await self._client.post(
            url, data=BodyPayload(call.body), headers=headers, allow_redirects=False
        )

    def pick_headers(self, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
        """Return the headers to forward to the client."""
        given = [item for item in response.headers.items() if item[0].lower() not in _WITHHELD_HEADERS]
        values = "\n".join([value for _, value in given])
        if self.scrubber.scrub_text(values) != values:
            given = [item for item in given if self.scrubber.scrub_text(item[1]) == item[1]]
        return CIMultiDict(given)

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


class OpenedResponse:
    """A response whose headers have arrived; the body of an error is read whole to classify it."""

    def __init__(
        self, endpoint: HttpEndpoint, response: aiohttp.ClientResponse, body: bytes | None, entered: float
    ) -> None:
        self.endpoint = endpoint
        self.entered = entered
        self.response = response
        self.body = body
        self.failure = failure_of(response.status, response.headers, body) if body is not None else None

    @property
    def may_be_tried_again(self) -> bool:
        """Whether the same server may answer the same request later."""
        if self.failure is None or not self.failure.again or self.response.status not in RETRIED_STATUSES:
            return False
        return self._permits_retry and self.failure.after <= LONGEST_WAIT

    @property
    def may_be_tried_elsewhere(self) -> bool:
        """Whether another server may answer the same request: the fault is this server's, or its key's."""
        if self.failure is None:
            return False
        return self.may_be_tried_again or (
            self._permits_retry and (self.failure.again or self.failure.where is FailureOrigin.RUN)
        )

    @property
    def is_rate_limited(self) -> bool:
        return self.response.status in RATE_LIMITED

    @property
    def _permits_retry(self) -> bool:
        return self.response.headers.get("x-should-retry", "").lower() != "false"
