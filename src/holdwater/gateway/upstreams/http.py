"""The upstream for HTTP servers, one or several: retries before the first byte, and the circuit breaker.

`endpoint_choice.py` chooses the server of each call, `http_endpoint.py` sends it. `retry.py` decides the
meaning of a status; the dialects parse the content.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from types import TracebackType
from typing import Self

import aiohttp

from ...core.endpoints import EndpointUse
from ...core.errors import ModelFailed
from ...core.records import AttemptFailure, FailureOrigin
from ...dialect import DIALECTS
from . import UpstreamCall
from .endpoint_choice import CallTry, EndpointChoice, NoteChange, has_other, ignore_change
from .http_endpoint import EndpointTerms, HttpEndpoint, OpenedResponse, ProviderAddress
from .retry import ABSENT, HINT, BreakerTripped, CircuitBreaker, choose_delay, make_trip_failure
from .scrubbing import ScrubbedStream

VERSION_HEADER = "X-Policy-Version"  # names the weights that answered
DRAIN_SECONDS = 0.05  # seconds to read the rest of a complete answer; then the connection is closed


class HttpUpstream:
    """One URL for all dialects, an address for each supported one, or several servers.

    Use it with `async with`.
    """

    def __init__(
        self,
        servers: str | Mapping[str, ProviderAddress] | Sequence[EndpointTerms],
        key: str | None = None,
        *,
        retries: int = 4,
        stall: float = 600.0,
        breaker: CircuitBreaker | None = None,
        note: NoteChange = ignore_change,
    ) -> None:
        if isinstance(servers, str):
            servers = dict.fromkeys(DIALECTS, ProviderAddress(servers, key))
        terms = [EndpointTerms(servers)] if isinstance(servers, Mapping) else servers
        self._endpoints = [HttpEndpoint(one, stall) for one in terms]
        self._choice = EndpointChoice(self._endpoints, note)
        self.dialects = frozenset[str].intersection(*(endpoint.dialects for endpoint in self._endpoints))
        self.counting = self.dialects
        self._retries = retries
        self._breaker = breaker or CircuitBreaker()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for endpoint in self._endpoints:
                await stack.enter_async_context(endpoint)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @property
    def busy(self) -> bool:
        """Whether calls are in flight."""
        return any(endpoint.gate.inside > 0 for endpoint in self._endpoints)

    def report_uses(self) -> tuple[EndpointUse, ...]:
        """Return the calls of each server since the last report; nothing for a single server."""
        return self._choice.report_uses()

    def send(self, call: UpstreamCall) -> HttpCall:
        return HttpCall(self, call)

    async def open_answer(self, call: UpstreamCall) -> HttpAnswer:
        """Return an answer as soon as its first byte is there; the caller must call `close`."""
        opened = await self._reach(call)
        try:
            if opened.body is None:  # after an error it may be sent once more, translated
                call.body.free()
            return HttpAnswer(opened, self._judge(call, opened))
        except BaseException:  # boundary: releases, then raises again
            opened.endpoint.close(opened)
            raise

    def close(self, call: UpstreamCall, answer: HttpAnswer, error: BaseException | None) -> None:
        """Release an answer that was read, or not, because of `error`."""
        opened = answer.opened
        opened.endpoint.close(opened)
        if opened.failure is not None:
            return  # the status said it
        found = error if isinstance(error, ModelFailed) else answer.failure
        if found is not None and (found.again or found.where is FailureOrigin.RUN):
            self._choice.record_failure(call, opened.endpoint, found.message, opened.entered)
        elif error is None:
            self._choice.record_success(opened.endpoint)

    async def _reach(self, call: UpstreamCall) -> OpenedResponse:
        try:
            return await self._send_with_retries(call)
        except ModelFailed as error:
            now = asyncio.get_running_loop().time()
            if error.again and self._breaker.record_failure(call.attempt, now):
                raise BreakerTripped(self._breaker.describe(now, error.message), HINT) from None
            raise

    async def _send_with_retries(self, call: UpstreamCall) -> OpenedResponse:
        """Return the first answer not to be retried, or the last one; the caller must close it.

        Every server gets one try without a delay; the retries after that have delays.
        """
        serving = self._choice.list_serving(call)
        tries: dict[HttpEndpoint, CallTry] = {}
        for left in reversed(range(len(serving) + self._retries)):
            endpoint = self._choice.choose(call, serving, tries, asyncio.get_running_loop().time())
            if endpoint in tries:
                await _wait_to_retry(call, tries[endpoint])
            opened = await self._try_once(call, endpoint, last=not left)
            if opened is not None and opened.failure is None:
                return opened
            tries[endpoint] = _plan_retry(tries.get(endpoint), opened)
            if opened is None:
                continue
            if call.trial and opened.response.status in ABSENT:
                return opened
            self._record_status(call, opened, tries[endpoint].again_at)
            if not left or not call.body.at_hand or not _goes_on(opened, serving, tries):
                return opened
            endpoint.close(opened)
        raise AssertionError("the last try returns or raises")

    async def _try_once(
        self, call: UpstreamCall, endpoint: HttpEndpoint, *, last: bool
    ) -> OpenedResponse | None:
        """Return a server's answer; None if there is none, and the call can be tried again."""
        entered = asyncio.get_running_loop().time()
        try:
            return await endpoint.send_once(call)
        except aiohttp.SocketTimeoutError:
            error = endpoint.make_stall_error()
            self._choice.record_failure(call, endpoint, error.message, entered)
            raise error from None
        except (aiohttp.ClientError, OSError) as lost:
            error = endpoint.make_error("unreachable", "the upstream cannot be reached", lost)
            self._choice.record_failure(call, endpoint, error.message, entered, certain=True)
            if last or not call.body.at_hand:
                raise error from None
            return None

    def _record_status(self, call: UpstreamCall, opened: OpenedResponse, again_at: float) -> None:
        """Record the meaning of a status for its server; a success is known at the end of the answer."""
        failure = opened.failure
        if failure is None:
            return
        if failure.kind == "429" and again_at < math.inf:
            opened.endpoint.health.record_refusal(again_at)
        elif failure.again or failure.where is FailureOrigin.RUN:
            certain = failure.where is FailureOrigin.RUN
            self._choice.record_failure(
                call, opened.endpoint, failure.message, opened.entered, certain=certain
            )
        else:
            self._choice.record_success(opened.endpoint)

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


class HttpCall:
    """A call and its answer, as a context. A class, because a generator costs more per call."""

    def __init__(self, upstream: HttpUpstream, call: UpstreamCall) -> None:
        self._upstream = upstream
        self._call = call

    async def __aenter__(self) -> HttpAnswer:
        self._answer = await self._upstream.open_answer(self._call)
        return self._answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await _drain(self._answer.opened.response)
        finally:
            self._upstream.close(self._call, self._answer, error)


class HttpAnswer:
    """A response of an HTTP server that is forwarded to the client."""

    waits = False
    original: bytes | None = None

    def __init__(self, opened: OpenedResponse, failure: AttemptFailure | None) -> None:
        endpoint, response = opened.endpoint, opened.response
        self.opened = opened
        self.status = response.status
        self.headers = endpoint.pick_headers(response)
        self.failure = failure
        version = response.headers.get(VERSION_HEADER)
        self.version = endpoint.scrubber.scrub_text(version) if version is not None else None

    async def pieces(self) -> AsyncIterator[bytes]:
        if self.opened.body is not None:
            yield self.opened.body
            return
        endpoint, content = self.opened.endpoint, self.opened.response.content
        stream = ScrubbedStream(endpoint.scrubber)
        try:
            while piece := await content.readany():
                if clean := stream.feed(piece):
                    yield clean
            if rest := stream.flush():
                yield rest
        except aiohttp.SocketTimeoutError:
            raise endpoint.make_stall_error() from None
        except (aiohttp.ClientError, OSError) as error:
            raise endpoint.make_error("cut", "the upstream's answer broke off", error) from None


def _plan_retry(before: CallTry | None, opened: OpenedResponse | None) -> CallTry:
    """Return when a server may be tried again after an answer, or after none."""
    number = 1 if before is None else before.number + 1
    now = asyncio.get_running_loop().time()
    if opened is None:
        return CallTry(number, now + choose_delay(number, {}))
    if not opened.may_be_tried_again:
        return CallTry(number, math.inf)
    delay = choose_delay(number, opened.response.headers, opened.body or b"")
    return CallTry(number, now + delay, opened.is_rate_limited)


def _goes_on(
    opened: OpenedResponse, serving: Sequence[HttpEndpoint], tries: dict[HttpEndpoint, CallTry]
) -> bool:
    """Whether the call is tried again after this answer, here or at another server."""
    if opened.may_be_tried_again:
        return True
    return opened.may_be_tried_elsewhere and has_other(serving, tries, opened.endpoint)


async def _wait_to_retry(call: UpstreamCall, planned: CallTry) -> None:
    seconds = planned.again_at - asyncio.get_running_loop().time()
    with call.waiting() if planned.limited else nullcontext():
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
