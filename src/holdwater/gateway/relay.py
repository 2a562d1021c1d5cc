"""The way of one call: read, taken apart, passed upstream, recorded, and only then answered to its end.

Everything that can happen on the way has its place in the record. Who may call is decided in `server.py`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from ..core.errors import ModelFailed
from ..core.records import Failure, MiB, Where
from .body import Admission, Body, Part, Retention, joined
from .dialects import chat
from .incoming import read_body
from .recorder import UNREADABLE, Delta, Form, Malformed
from .sessions import Ending, Session
from .upstreams import Answer, Call, Upstream
from .upstreams.retry import error_of

FORM = Form()
GONE = 499  # in the record: the client went away before it had an answer
LARGEST_REPLY = 64 * MiB
SERVER = {"Server": "holdwater"}

_NOT_SENT = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "trailers",
        "transfer-encoding",
        "upgrade",
        "host",
        "authorization",
        "x-api-key",
        "api-key",
        "x-goog-api-key",
        "cookie",
        "content-length",
        "content-encoding",
        "accept-encoding",
        "expect",
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-real-ip",
    }
)


def refusal(status: int, message: str, code: str | None = None) -> web.Response:
    """An error of the gateway itself, in the client's dialect; the header keeps clients from looping."""
    return web.Response(
        status=status,
        body=chat.error_body(status, message, code),
        content_type="application/json",
        headers={"x-should-retry": "false", **SERVER},
    )


class Prepared(NamedTuple):
    """A request that is ready to go up."""

    call: Call
    delta: Delta
    asked: chat.Asked


class Relay:
    """Passes calls of all sessions to one upstream."""

    def __init__(self, upstream: Upstream, model: str | None, admission: Admission, body_cap: int) -> None:
        self.admission = admission
        self.retention = Retention(admission.bound)
        self._upstream = upstream
        self._model = model
        self._cap = body_cap

    async def pass_on(self, request: web.BaseRequest, session: Session) -> web.StreamResponse:
        """One Chat Completions call."""
        call, delta, asked = await self._prepare(request, session)
        turn = Turn(request, session, delta)
        try:
            async with self._upstream.send(call) as answer:
                if answer.headers.get("Content-Type", "").lower().startswith("text/event-stream"):
                    return await turn.stream(answer, chat.Stream(asked.wants_usage))
                return await turn.whole(answer)
        except ModelFailed as error:
            return turn.failed(error)
        except (asyncio.CancelledError, ConnectionError):
            turn.abandoned()
            raise
        finally:
            call.body.free()

    async def _prepare(self, request: web.BaseRequest, session: Session) -> Prepared:
        content, admitted = await read_body(request, self.admission, self._cap)
        try:
            reading = session.recorder(FORM).read(content)
            asked, head, amended = self._head(reading.head)
            parts: tuple[Part, ...] = joined(FORM.key, head, reading.span) if amended else (content,)
            delta = await session.delta(FORM, reading, head)
        except BaseException:
            admitted.release()
            raise
        body = Body(parts, admitted, self.retention)
        return Prepared(Call(chat.PATH, _headers(request, session), body, session.waiting), delta, asked)

    def _head(self, head: dict[str, msgspec.Raw]) -> tuple[chat.Asked, bytes, bool]:
        """What the request asks for; its keys as they go upstream; and whether any had to change."""
        encoded = msgspec.json.encode(head)
        try:
            asked = msgspec.json.decode(encoded, type=chat.Asked)
        except UNREADABLE as error:
            raise Malformed(str(error)) from None
        changes = chat.amended(head, asked, self._model)
        return asked, msgspec.json.encode({**head, **changes}) if changes else encoded, bool(changes)


class Turn:
    """The answer to one call, on its way to the client and into the record."""

    def __init__(self, request: web.BaseRequest, session: Session, delta: Delta) -> None:
        self._request = request
        self._session = session
        self._delta = delta
        self._started = time.time()
        self._written = False
        self._stream: chat.Stream | None = None
        self._response: web.StreamResponse | None = None

    async def whole(self, answer: Answer) -> web.Response:
        """An answer in one piece."""
        body = b"".join([piece async for piece in _bounded(answer)])
        failure = answer.failure
        try:
            reply = chat.read_reply(body)
            ending = Ending(answer.status, body, reply.usage)
            if failure is None and reply.error is not None:
                failure = _inside(reply.error)
        except UNREADABLE as error:
            ending = Ending(answer.status)
            failure = failure or _garbage(f"the upstream's reply is no JSON: {error}")
        self._write(ending, failure)
        return web.Response(status=answer.status, headers=_returned(answer), body=body)

    async def stream(self, answer: Answer, stream: chat.Stream) -> web.StreamResponse:
        """An answer in events. Those that end it are held until the exchange is in the record."""
        self._stream = stream
        held: list[bytes] = []
        async for piece in _bounded(answer):
            held += stream.events(piece)
            if held and stream.began and not stream.ended:
                await self._send(answer, held)
            if stream.done:
                break
        if not stream.ended:
            raise ModelFailed("the upstream's stream ended early", kind="cut")
        failure = _inside(stream.error) if stream.error is not None else None
        self._write(Ending(answer.status, stream.reply(), stream.usage, streamed=True), failure)
        held.append(stream.rest)
        await self._send(answer, held)
        assert self._response is not None
        await self._response.write_eof()
        return self._response

    async def _send(self, answer: Answer, held: list[bytes]) -> None:
        if self._response is None:
            self._response = web.StreamResponse(status=answer.status, headers=_returned(answer))
            await self._response.prepare(self._request)
        await self._response.write(b"".join(held))
        held.clear()

    def failed(self, error: ModelFailed) -> web.StreamResponse:
        """There is no answer, or no end of it: an error where one can still be sent, a cut otherwise."""
        failure = Failure(
            where=error.where,
            kind=error.kind,
            message=error.message,
            hint=error.hint,
            again=error.again,
            after=error.after,
        )
        status = 504 if error.kind == "stall" else 502
        self._write(self._partial(status if self._response is None else GONE), failure)
        if self._response is None:
            return refusal(status, error.message, error.kind)
        self._abort()
        return self._response

    def abandoned(self) -> None:
        """The client went away, or its attempt ended; what came so far is in the record."""
        if self._response is not None:
            self._abort()
        if not self._written:
            reason = "the attempt ended" if self._session.closed else "client went away"
            self._session.write(self._delta, self._partial(GONE)._replace(error=reason), self._started)

    def _partial(self, status: int) -> Ending:
        stream = self._stream
        if stream is None:
            return Ending(status)
        return Ending(status, stream.reply() if stream.began else None, stream.usage, streamed=True)

    def _write(self, ending: Ending, failure: Failure | None) -> None:
        if failure is not None and not ending.error:
            ending = ending._replace(error=failure.message)
        self._written = True
        self._session.write(self._delta, ending, self._started)
        self._session.failure = failure

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _headers(request: web.BaseRequest, session: Session) -> dict[str, str]:
    """The client's headers that go upstream: not those of its connection, and nothing with its key."""
    return {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in _NOT_SENT and session.key not in value
    }


def _returned(answer: Answer) -> CIMultiDict[str]:
    headers = answer.headers.copy()
    headers.update(SERVER)
    return headers


async def _bounded(answer: Answer) -> AsyncIterator[bytes]:
    """The pieces of an answer, up to the size of one that can be kept in memory."""
    size = 0
    async for piece in answer.pieces():
        size += len(piece)
        if size > LARGEST_REPLY:
            raise ModelFailed(f"the upstream's reply is larger than {LARGEST_REPLY} bytes", kind="garbage")
        yield piece


def _inside(error: object) -> Failure:
    """An error inside a 200."""
    message = error_of(error).message or "an error without a message"
    return Failure(
        where=Where.MODEL, kind="error", message=f"the upstream failed inside its reply: {message}"
    )


def _garbage(message: str) -> Failure:
    return Failure(where=Where.MODEL, kind="garbage", message=message)
