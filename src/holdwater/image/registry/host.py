"""One registry's HTTP: signed, paced, redirected, tried again. Nothing is signed for another host.

What leaves here is an answer that was expected, or a `Refusal`. What is asked is in `client.py` and
`upload.py`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import aiohttp
from yarl import URL

from ...core.image import Note, Registry
from .credentials import Credentials
from .flow import Flow, whole
from .pace import Pace, Patience
from .reference import api_host, is_loopback
from .refusal import LARGEST_ERROR, Refusal, refusal, unreached
from .tokens import Authority, Scopes

T = TypeVar("T")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MOST_REDIRECTS = 5
_MOST_ASKED = 3  # unsigned, with a token that has expired, with a new one
_TROUBLE = (aiohttp.ClientError, OSError, TimeoutError)


class Ask(NamedTuple):
    """One request. `what` begins the message where it is refused: `the manifest of ... cannot be read`."""

    method: str
    path: str  # below `/v2/`, or a whole URL
    what: str
    scopes: Scopes
    headers: Mapping[str, str] = {}
    body: bytes | Flow | None = None  # a flow can be sent once


class Answer(NamedTuple):
    """A small answer, whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: URL


class Host:
    """Made in a running loop; the session is the caller's."""

    def __init__(
        self,
        registry: str,
        settings: Registry,
        session: aiohttp.ClientSession,
        credentials: Credentials,
        note: Note,
        patience: Patience,
    ) -> None:
        host = api_host(registry)
        scheme = "http" if settings.insecure or is_loopback(host) else "https"
        self.registry = registry
        self.note = note
        self._base = URL(f"{scheme}://{host}")
        self._root = f"{scheme}://{host}/v2/"
        self._session = session
        self._patience = patience
        self._pace = Pace(settings.requests_a_minute)
        self._authority = Authority(registry, self._base, credentials, session)
        self._clock = asyncio.get_running_loop().time

    async def trying(self, operation: Callable[[], Awaitable[T]]) -> T:
        """What `operation` returns, tried again while that can help and patience lasts."""
        tried, limited, waited = 0, 0, 0.0
        while True:
            try:
                return await operation()
            except Refusal as error:
                if not error.again or error.spent:
                    raise
                tried, limited = (tried, limited + 1) if error.kind == "rate" else (tried + 1, limited)
                seconds = error.after or self._patience.delay(tried + limited)
                waited += seconds
                error.spent = tried >= self._patience.tries or waited > self._patience.waiting
                paused = error.after > 0.0 or error.kind == "rate"
                if paused:
                    self._pace.pause(seconds)
                if error.spent:
                    error.after = seconds if paused else 0.0
                    raise
                self.note(f"registry.{error.kind}", error.message)
            if not paused:  # a pause is waited for where everyone else waits for it
                await asyncio.sleep(seconds)

    async def answer(self, ask: Ask, expected: frozenset[int], most: int = LARGEST_ERROR) -> Answer:
        """The whole answer to one request, of at most so many bytes."""
        response = await self.open(ask, expected)
        failure, body = None, b""
        try:
            body = await whole(response, most)
        except _TROUBLE as error:
            failure = self._unreached(ask, error)
        finally:
            response.close()  # one that was read to its end has given its connection back
        if len(body) > most:
            failure = unreached(ask.what, f"the answer has more than {most} bytes", again=False)
        if failure is not None:
            raise failure
        return Answer(response.status, response.headers, body, response.url)

    async def open(self, ask: Ask, expected: frozenset[int]) -> aiohttp.ClientResponse:
        """An answer whose body is not read yet; the caller closes it."""
        try:
            response = await self._signed(ask)
            if response.status in expected:
                return response
            failure = await self._refusal(ask, response)
        except _TROUBLE as error:
            failure = self._unreached(ask, error)
        raise failure

    def located(self, location: str, base: URL) -> URL:
        """Where a `Location` leads. The registry itself is not asked in the clear, whatever it says."""
        url = base.join(URL(location, encoded=True))
        if (
            self._base.scheme == "https"
            and url.scheme == "http"
            and _origin(url)[1] == _origin(self._base)[1]
        ):
            url = url.with_scheme("https").with_port(self._base.explicit_port)
        return url

    async def _signed(self, ask: Ask) -> aiohttp.ClientResponse:
        url = URL(ask.path if "://" in ask.path else self._root + ask.path, encoded=True)
        for asked in range(1, _MOST_ASKED + 1):
            if too_long := await self._pace.turn(self._patience):
                raise self._paused(ask, too_long)
            header = await self._authority.header(ask.scopes) if self._own(url) else None
            response = await self._followed(ask, url, header)
            if response.status != 401 or asked == _MOST_ASKED or not self._own(response.url):
                break
            wanted = response.headers.getall("WWW-Authenticate", ())
            if not await self._authority.refused(ask.scopes, header, wanted):
                break
            response.release()
            if isinstance(ask.body, Flow):
                raise unreached(ask.what, "the token expired while it was sent")
        return response

    async def _followed(self, ask: Ask, url: URL, header: str | None) -> aiohttp.ClientResponse:
        """The answer at the end of redirects, which are followed for what is read alone."""
        for _ in range(_MOST_REDIRECTS):
            response = await self._sent(ask, url, header if self._own(url) else None)
            target = response.headers.get("Location")
            if response.status not in _REDIRECTS or ask.method not in ("GET", "HEAD") or not target:
                return response
            response.release()
            url = self.located(target, url)
        raise unreached(ask.what, f"more than {_MOST_REDIRECTS} redirects")

    async def _sent(self, ask: Ask, url: URL, header: str | None) -> aiohttp.ClientResponse:
        headers = {**ask.headers, "Authorization": header} if header else ask.headers
        data = io.BytesIO(ask.body) if isinstance(ask.body, bytes) else ask.body
        async with asyncio.timeout(self._patience.stall) as limit:
            if isinstance(ask.body, Flow):
                ask.body.beat = lambda: limit.reschedule(self._clock() + self._patience.stall)
            return await self._session.request(
                ask.method, url, headers=headers, data=data, allow_redirects=False
            )

    def _own(self, url: URL) -> bool:
        return _origin(url) == _origin(self._base)

    async def _refusal(self, ask: Ask, response: aiohttp.ClientResponse) -> Refusal:
        try:
            body = await whole(response, LARGEST_ERROR)
        finally:
            response.close()  # one that was read to its end has given its connection back
        text = (await self._authority.scrubbed(body.decode(errors="replace"))).encode()
        if self._own(response.url) or response.status == 429 or response.status >= 500:
            return refusal(ask.what, response.status, response.headers, text)
        # Another host's word on what this one handed it says nothing about the image.
        return unreached(ask.what, f"`{response.url.host}` answered {response.status}")

    def _paused(self, ask: Ask, seconds: float) -> Refusal:
        why = f"`{self.registry}` asked everyone to wait for {seconds:.0f} s"
        failure = Refusal(f"{ask.what}: {why}", kind="rate", after=seconds)
        failure.spent = True
        return failure

    def _unreached(self, ask: Ask, error: BaseException) -> Refusal:
        if isinstance(ask.body, Flow) and ask.body.failure is not None:
            return ask.body.failure
        if isinstance(error, aiohttp.ClientSSLError):
            hint = "a registry that speaks plain HTTP needs `insecure`"
            return unreached(ask.what, str(error), again=False, hint=hint)
        if isinstance(error, TimeoutError):
            return unreached(ask.what, f"`{self.registry}` was silent for {self._patience.stall:g} s")
        return unreached(ask.what, f"`{self.registry}`: {_told(error)}")


def _origin(url: URL) -> tuple[str, str, int | None]:
    return url.scheme, (url.host or "").lower(), url.port


def _told(error: BaseException) -> str:
    """Without what aiohttp knows of the request: that has the headers."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"a broken answer: {error.message}"
    return str(error) or type(error).__name__
