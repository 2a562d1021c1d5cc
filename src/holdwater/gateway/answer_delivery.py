"""Delivers the answer to one call, whole or as a stream, and records it before its last byte is sent.

Keep-alive events reach the client while its upstream is silent in mid-stream, so that no proxy disconnects.
`relay.py` gets the answer from the upstream or the record. `sessions.py` writes the exchange.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self

from aiohttp import web
from multidict import CIMultiDict

from ..core.errors import ModelFailed
from ..core.exchange import RecordedReply
from ..core.failures import UNRECORDED
from ..core.records import NO_USAGE, AttemptFailure, FailureOrigin, MiB
from ..dialect.interface import Dialect
from ..dialect.message import DECODE_ERRORS
from ..dialect.sse import EventStream
from .in_process_calls import IncomingRequest, InProcessRequest
from .recorder import BILLED_KINDS, CallEnding, RequestDelta
from .routes import SERVER_HEADER, make_refusal
from .session_calls import ThreadCall
from .sessions import Session
from .upstreams import UpstreamAnswer
from .upstreams.retry import failure_inside

ResponseOpener = Callable[[], Awaitable[web.StreamResponse]]
CLIENT_GONE = 499  # in the record: the client disconnected before it had an answer
LARGEST_REPLY = 64 * MiB
_STATUS = {"stall": 504, "invalid": 400, UNRECORDED: 400}  # statuses of failures other than 502


class KeepAlive:
    """`async with KeepAlive(sign, every)`. Silent until `start`, and after an error of the connection."""

    def __init__(self, sign: bytes, every: float) -> None:
        self._sign = sign
        self._every = every
        self._loop = asyncio.get_running_loop()
        self._response: web.StreamResponse | None = None
        self._opening: ResponseOpener | None = None
        self._last_sent = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None  # awaited in `__aexit__`

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])

    def start(self, response: web.StreamResponse) -> None:
        """Keep `response` alive from now on."""
        self._response = response
        self.mark_sent()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._every, self._on_timer)

    def start_later(self, opening: ResponseOpener) -> None:
        """Open a response for the first keep-alive event, unless one is started before it is due."""
        self._opening = opening
        self.mark_sent()
        self._timer = self._loop.call_later(self._every, self._on_timer)

    async def finish_opening(self) -> None:
        """Open no response from now on; wait until a response that is being opened is open."""
        if self._opening is not None:
            self._opening = None
            if self._writing is not None:
                await asyncio.wait([self._writing])

    def stop(self) -> None:
        """Send nothing more: the end of the stream is next."""
        self._response = None

    def mark_sent(self) -> None:
        """Record that bytes were sent just now."""
        self._last_sent = self._loop.time()

    def _on_timer(self) -> None:
        rest = self._last_sent + self._every - self._loop.time()
        if rest <= 0.0 and (self._writing is None or self._writing.done()):
            self._writing = self._loop.create_task(self._send_sign())
        self._timer = self._loop.call_later(rest if rest > 0.0 else self._every, self._on_timer)

    async def _send_sign(self) -> None:
        try:
            if self._response is None and self._opening is not None:
                self._response = await self._opening()
            if self._response is None:
                return
            await self._response.write(self._sign)
        except ConnectionError:
            pass  # the client disconnected: the call itself gets its own error


class AnswerDelivery:
    """Delivers the answer to one call to the client and writes it to the record."""

    def __init__(
        self,
        request: IncomingRequest,
        session: Session,
        delta: RequestDelta,
        dialect: Dialect,
        recorded: RecordedReply | None,
        call: ThreadCall,
        model: str | None,
    ) -> None:
        self._request = request
        self._call = call
        self._model = model
        self._threads = session.find_threads(dialect)
        self._saved = recorded.usage if recorded is not None else None
        self._unlimited = recorded is not None and recorded.unlimited
        self._session = session
        self._delta = delta
        self._dialect = dialect
        self._started = time.time()
        self._written = False
        self._answer: UpstreamAnswer | None = None
        self._version = ""  # of the policy, if its answer does not name it
        self._stream: EventStream | None = None
        self._response: web.StreamResponse | None = None

    def set_answer(self, answer: UpstreamAnswer, version: str) -> None:
        self._answer = answer
        self._version = version

    async def deliver_whole(self, answer: UpstreamAnswer) -> web.Response:
        """Deliver an answer in one piece."""
        body = await _read_whole(answer)
        failure = answer.failure
        try:
            reply = self._dialect.read_reply(body)
            ending = CallEnding(answer.status, reply.reply or body, reply.usage, chunks=reply.chunks)
            if failure is None and reply.error is not None:
                failure = failure_inside(reply.error)
            elif failure is None and not reply.usage.tokens and not self._dialect.recognizes_reply(body):
                failure = _make_garbage(
                    f"has no `{self._dialect.reply_key}` of the dialect `{self._dialect.name}`"
                )
        except DECODE_ERRORS as error:
            ending = CallEnding(answer.status)
            failure = failure or _make_garbage(f"is not valid JSON: {error}")
        self._write(ending, failure)
        return web.Response(status=answer.status, headers=_prepare_headers(answer), body=body)

    async def deliver_stream(
        self, answer: UpstreamAnswer, stream: EventStream, pulse: KeepAlive
    ) -> web.StreamResponse:
        """Deliver an answer in events. The last events are held until the exchange is recorded."""
        self._stream = stream
        held: list[bytes] = []
        size = 0
        if answer.waits:
            pulse.start_later(self._open_response)
        async for piece in answer.pieces():
            size = _check_size(size + len(piece))
            held += stream.events(piece)
            if held and stream.began and not stream.ended:
                await self._send(answer, held, pulse)
            if stream.done:
                break
        if not stream.ended:
            raise ModelFailed("the upstream's stream ended early", kind="cut")
        failure = failure_inside(stream.error) if stream.error is not None else None
        ending = CallEnding(answer.status, stream.reply(), stream.usage, streamed=True, chunks=stream.chunks)
        self._write(ending, failure)
        held.append(stream.rest)
        await self._send(answer, held, pulse)
        assert self._response is not None
        pulse.stop()
        await self._response.write_eof()
        return self._response

    async def _send(self, answer: UpstreamAnswer, held: list[bytes], pulse: KeepAlive) -> None:
        await pulse.finish_opening()
        if self._response is None:
            pulse.start(await self._open_response())
        assert self._response is not None
        pulse.mark_sent()
        await self._response.write(b"".join(held))
        held.clear()

    async def _open_response(self) -> web.StreamResponse:
        assert self._answer is not None
        assert not isinstance(self._request, InProcessRequest), "an in-process answer is never a stream"
        self._response = web.StreamResponse(
            status=self._answer.status, headers=_prepare_headers(self._answer)
        )
        await self._response.prepare(self._request)
        return self._response

    def deliver_failure(self, error: ModelFailed) -> web.StreamResponse:
        """Handle a missing or incomplete answer: send an error if possible, else cut the connection."""
        failure = AttemptFailure(
            where=error.where,
            kind=error.kind,
            message=error.message,
            hint=error.hint,
            again=error.again,
            after=error.after,
        )
        status = _STATUS.get(error.kind, 502)
        self._write(self._make_partial(status if self._response is None else CLIENT_GONE), failure)
        if self._response is None:
            return make_refusal(self._dialect, status, error.message, error.kind)
        self._abort()
        return self._response

    def abandon(self) -> None:
        """Record the partial answer after the client disconnected or its attempt ended."""
        if self._response is not None:
            self._abort()
        if not self._written:
            reason = "the attempt ended" if self._session.closed else "client went away"
            nothing = NO_USAGE if self._saved is not None else None
            ending = self._make_partial(CLIENT_GONE)._replace(
                error=reason,
                saved=nothing,
                version=self._find_version(),
                unlimited=self._unlimited,
                model=self._model,
            )
            self._threads.abandon(self._call)
            self._session.write(self._delta, ending, self._started, self._call)

    def _make_partial(self, status: int) -> CallEnding:
        stream = self._stream
        if stream is None:
            return CallEnding(status)
        return CallEnding(status, stream.reply() if stream.began else None, stream.usage, streamed=True)

    def _write(self, ending: CallEnding, failure: AttemptFailure | None) -> None:
        if failure is not None and self._answer is not None:
            self._answer.failure = failure
        if failure is not None and not ending.error:
            ending = ending._replace(error=failure.message, billed=failure.kind in BILLED_KINDS)
        self._written = True
        if self._dialect.counted_dialect:  # no provider charges for a count
            ending = ending._replace(billed=False)
        ending = ending._replace(
            saved=self._saved,
            version=self._find_version(),
            unlimited=self._unlimited,
            original=self._answer.original if self._answer is not None else None,
            model=self._model,
        )
        self._session.write(self._delta, ending, self._started, self._call)
        self._threads.end(self._call, failure)

    def _find_version(self) -> str:
        """Return the version of the policy that answered; empty if there is no answer."""
        if self._answer is None:
            return ""
        return self._version if self._answer.version is None else self._answer.version

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _make_garbage(problem: str) -> AttemptFailure:
    message = f"the upstream's reply {problem}"
    return AttemptFailure(where=FailureOrigin.MODEL, kind="garbage", message=message)


def _prepare_headers(answer: UpstreamAnswer) -> CIMultiDict[str]:
    answer.headers.update(SERVER_HEADER)
    return answer.headers


async def _read_whole(answer: UpstreamAnswer) -> bytes:
    pieces: list[bytes] = []  # bound: `LARGEST_REPLY` bytes
    size = 0
    async for piece in answer.pieces():
        size = _check_size(size + len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _check_size(size: int) -> int:
    """Return the size of an answer so far; raise `ModelFailed` if it is too large to keep in memory."""
    if size > LARGEST_REPLY:
        raise ModelFailed(f"the upstream's reply is larger than {LARGEST_REPLY} bytes", kind="garbage")
    return size
