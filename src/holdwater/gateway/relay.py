"""The way of one call: read, taken apart, passed upstream, recorded, and only then answered to its end.

Everything that can happen on the way has its place in the record. Who may call is decided in `server.py`,
what the bytes mean in the dialects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw
from multidict import CIMultiDict

from ..core.authoring import Recorded
from ..core.errors import HoldwaterError, ModelFailed
from ..core.records import NO_USAGE, Failure, MiB, Where
from .behind import Behind
from .body import Admission, Body, Retention, joined
from .call_threads import ThreadCall
from .dialects import Asked, Dialect, Stream
from .headers import pick_headers
from .incoming import read_body, too_large
from .near import Near, Request
from .pulse import Pulse
from .recorder import UNREADABLE, Delta, Form, Malformed, Reading
from .routes import Route
from .sampling import imposed
from .sessions import BILLED, Ending, Session
from .side import SERVER, counted, refusal
from .upstreams import Answer, Call, Upstream
from .upstreams.replay import UNRECORDED, manner
from .upstreams.retry import failure_inside
from .upstreams.whole import Whole

GONE = 499  # in the record: the client went away before it had an answer
LARGEST_REPLY = 64 * MiB
KEEP_ALIVE = 15.0  # seconds of silence in mid-stream
_STATUS = {"stall": 504, UNRECORDED: 400}  # of failures that are no 502
NOT_COUNTING = frozenset({404, 405, 501})  # from an upstream that does not know how to count tokens


class Unspoken(HoldwaterError):
    """The upstream does not speak the client's dialect."""


class Prepared(NamedTuple):
    """A request that is ready to go up."""

    call: Call
    delta: Delta
    asked: Asked
    requested: int  # by the clock of its threads
    has_tools: bool


class Relay:
    """Passes the calls of all sessions on: to the upstream behind each, `own` where it has none."""

    def __init__(self, own: Behind, admission: Admission, body_cap: int, keep_alive: float) -> None:
        self.own = own
        self.admission = admission
        self.retention = Retention(admission.bound)
        self._cap = body_cap
        self._keep_alive = keep_alive

    def behind(self, session: Session) -> Behind:
        """Who answers a call of `session` that comes now."""
        return self.own if session.behind is None else session.behind.over(self.own)

    async def pass_on(self, request: Request, session: Session, route: Route) -> web.StreamResponse:
        """One call that is a turn of a conversation."""
        behind = self.behind(session)
        _check_spoken(behind, session, route.dialect)
        prepared = await self._prepare(request, session, route, behind)
        recorded = session.recorded(prepared.delta)
        return await self._exchange(request, session, route.dialect, behind, prepared, recorded)

    async def count(self, request: Request, session: Session, route: Route) -> web.StreamResponse:
        """How many tokens a request has: the upstream's answer, or an estimate, which is not recorded."""
        counts = route.dialect.form.of
        behind = self.behind(session)
        prepared = await self._prepare(request, session, route, behind)
        estimate = counted(route.dialect, prepared.call.body.size)
        recorded = session.recorded(prepared.delta)
        upstream = behind.upstream
        able = upstream is not None and upstream.counts and counts in upstream.dialects - session.uncounted
        if recorded is None and not able:
            prepared.call.body.free()
            return estimate
        response = await self._exchange(request, session, route.dialect, behind, prepared, recorded)
        if response.status in NOT_COUNTING:
            session.uncounted.add(counts)
            return estimate
        return estimate if response.status >= 500 else response

    async def _exchange(
        self,
        request: Request,
        session: Session,
        dialect: Dialect,
        behind: Behind,
        prepared: Prepared,
        recorded: Recorded | None,
    ) -> web.StreamResponse:
        """The answer to a call, on its way and in the record."""
        call, delta, asked, requested, has_tools = prepared
        placed = session.threads_of(dialect.form).begin(requested, delta, call.body.size, has_tools)
        turn = Turn(request, session, delta, dialect, recorded, placed)
        try:
            async with self._answer(call, session, recorded, dialect, behind) as answer:
                turn.answered(answer, behind.version)
                if answer.failure is None and _is_stream(answer) and not isinstance(request, Near):
                    async with Pulse(dialect.keep_alive, self._keep_alive) as pulse:
                        return await turn.stream(answer, dialect.stream(asked), pulse)
                return await turn.whole(answer)
        except ModelFailed as error:
            return turn.failed(error)
        except (asyncio.CancelledError, ConnectionError):
            turn.abandoned()
            raise
        finally:
            call.body.free()

    def _answer(
        self, call: Call, session: Session, recorded: Recorded | None, dialect: Dialect, behind: Behind
    ) -> AbstractAsyncContextManager[Answer]:
        if recorded is not None:
            reply, chunks = recorded.reply, recorded.chunks
            return nullcontext(Whole(reply, dialect, call.manner, recorded.version, chunks))
        assert behind.upstream is not None, "a gateway has an upstream of its own"
        # Where there is no record, it has had its turn already.
        return _paced(call, session, behind.upstream) if session.replays else behind.upstream.send(call)

    async def _prepare(self, request: Request, session: Session, route: Route, behind: Behind) -> Prepared:
        form = route.dialect.form
        requested = session.threads_of(form).tick()
        body, reading = await self._taken(request, session, form)
        try:
            asked = _imposing(_asked(route, reading.head, behind.model), form, reading.head, behind.sampling)
            has_tools = bytes(reading.head.get("tools", b"")) not in (b"", b"[]", b"null")
            sent = {**reading.head, **asked.changes}
            if asked.changes:
                body.replace(joined(form.key, msgspec.json.encode(sent), reading.span))
            told = {**asked.beside, **sent}
            wanted = manner(sent, asked.place)
            named = told
            if session.behind is not None and behind.model is not None:
                # The name of a policy that learns changes in mid-conversation.
                named = {key: raw for key, raw in told.items() if key != "model"}
            delta = await session.delta(form, reading, told, named)
        except BaseException:  # boundary: given back, then raised again
            body.free()
            raise
        call = _call(request, session, asked, route, body)
        call = call._replace(manner=wanted, delta=None if form.of else delta)
        return Prepared(call, delta, asked, requested, has_tools)

    async def _taken(self, request: Request, session: Session, form: Form) -> tuple[Body, Reading]:
        """A request's body, and what it says."""
        if isinstance(request, Near):
            body = request.body(form.key, self.retention)
            if body.size > self._cap:
                raise too_large(self._cap)
            return body, request.reading(form.key)
        content, admitted = await read_body(request, session.admission, self._cap)
        body = Body((content,), admitted, self.retention)
        try:
            return body, await session.read(form, content)
        except BaseException:  # boundary: given back, then raised again
            body.free()
            raise


def _check_spoken(behind: Behind, session: Session, dialect: Dialect) -> None:
    """The upstream speaks the dialect, or the call fails."""
    assert behind.upstream is not None, "a gateway has an upstream of its own"
    known = behind.upstream.dialects
    if dialect.form.dialect in known:
        return
    spoken = ", ".join(f"`{name}`" for name in sorted(known)) or "nothing"
    error = Unspoken(
        f"the upstream does not speak the agent's dialect `{dialect.form.dialect}`: it speaks {spoken}",
        "give the run an upstream that speaks it, or the agent another dialect",
    )
    failure = Failure(where=Where.RUN, kind="dialect", message=error.message, hint=error.hint, again=False)
    if not dialect.form.beside:
        session.threads.refuse(failure)
    raise error


@asynccontextmanager
async def _paced(call: Call, session: Session, upstream: Upstream) -> AsyncIterator[Answer]:
    async with session.paced(), upstream.send(call) as answer:
        yield answer


def _asked(route: Route, head: dict[str, Raw], model: str | None) -> Asked:
    try:
        return route.dialect.ask(head, route.place, model)
    except UNREADABLE as error:
        raise Malformed(str(error)) from None


def _imposing(asked: Asked, form: Form, head: dict[str, Raw], sampling: Mapping[str, Any]) -> Asked:
    try:
        changes = imposed(form.dialect, head, sampling)
    except UNREADABLE as error:
        raise Malformed(str(error)) from None
    return asked._replace(changes={**asked.changes, **changes}) if changes else asked


def _call(request: Request, session: Session, asked: Asked, route: Route, body: Body) -> Call:
    place = asked.place
    if session.key in place.query:  # in whatever parameter
        kept = [part for part in place.query.split("&") if session.key not in part]
        place = place._replace(query="&".join(kept))
    dialect = route.dialect.form.spoken
    headers = pick_headers(request.headers, session.key, dialect)
    return Call(place.target, headers, body, session.waiting, dialect, session.attempt)


class Turn:
    """The answer to one call, on its way to the client and into the record."""

    def __init__(
        self,
        request: Request,
        session: Session,
        delta: Delta,
        dialect: Dialect,
        recorded: Recorded | None,
        call: ThreadCall,
    ) -> None:
        self._request = request
        self._call = call
        self._threads = session.threads_of(dialect.form)
        self._saved = recorded.usage if recorded is not None else None
        self._session = session
        self._delta = delta
        self._dialect = dialect
        self._started = time.time()
        self._written = False
        self._answer: Answer | None = None
        self._version = ""  # of the policy, where its answer does not say it
        self._stream: Stream | None = None
        self._response: web.StreamResponse | None = None

    def answered(self, answer: Answer, version: str) -> None:
        self._answer = answer
        self._version = version

    async def whole(self, answer: Answer) -> web.Response:
        """An answer in one piece."""
        body = await _whole(answer)
        failure = answer.failure
        try:
            reply = self._dialect.read_reply(body)
            ending = Ending(answer.status, reply.reply or body, reply.usage, chunks=reply.chunks)
            if failure is None and reply.error is not None:
                failure = failure_inside(reply.error)
        except UNREADABLE as error:
            ending = Ending(answer.status)
            failure = failure or _garbage(f"the upstream's reply is no JSON: {error}")
        self._write(ending, failure)
        return web.Response(status=answer.status, headers=_returned(answer), body=body)

    async def stream(self, answer: Answer, stream: Stream, pulse: Pulse) -> web.StreamResponse:
        """An answer in events. Those that end it are held until the exchange is in the record."""
        self._stream = stream
        held: list[bytes] = []
        size = 0
        if answer.waits:
            pulse.later(self._open)
        async for piece in answer.pieces():
            size = _bounded(size + len(piece))
            held += stream.events(piece)
            if held and stream.began and not stream.ended:
                await self._send(answer, held, pulse)
            if stream.done:
                break
        if not stream.ended:
            raise ModelFailed("the upstream's stream ended early", kind="cut")
        failure = failure_inside(stream.error) if stream.error is not None else None
        ending = Ending(answer.status, stream.reply(), stream.usage, streamed=True, chunks=stream.chunks)
        self._write(ending, failure)
        held.append(stream.rest)
        await self._send(answer, held, pulse)
        assert self._response is not None
        pulse.stop()
        await self._response.write_eof()
        return self._response

    async def _send(self, answer: Answer, held: list[bytes], pulse: Pulse) -> None:
        await pulse.opened()
        if self._response is None:
            pulse.start(await self._open())
        assert self._response is not None
        pulse.heard()
        await self._response.write(b"".join(held))
        held.clear()

    async def _open(self) -> web.StreamResponse:
        assert self._answer is not None
        assert not isinstance(self._request, Near), "an answer to this process is never a stream"
        self._response = web.StreamResponse(status=self._answer.status, headers=_returned(self._answer))
        await self._response.prepare(self._request)
        return self._response

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
        status = _STATUS.get(error.kind, 502)
        self._write(self._partial(status if self._response is None else GONE), failure)
        if self._response is None:
            return refusal(self._dialect, status, error.message, error.kind)
        self._abort()
        return self._response

    def abandoned(self) -> None:
        """The client went away, or its attempt ended; what came so far is in the record."""
        if self._response is not None:
            self._abort()
        if not self._written:
            reason = "the attempt ended" if self._session.closed else "client went away"
            nothing = NO_USAGE if self._saved is not None else None
            ending = self._partial(GONE)._replace(error=reason, saved=nothing, version=self._told())
            self._threads.abandon(self._call)
            self._session.write(self._delta, ending, self._started, self._call)

    def _partial(self, status: int) -> Ending:
        stream = self._stream
        if stream is None:
            return Ending(status)
        return Ending(status, stream.reply() if stream.began else None, stream.usage, streamed=True)

    def _write(self, ending: Ending, failure: Failure | None) -> None:
        if failure is not None and not ending.error:
            ending = ending._replace(error=failure.message, billed=failure.kind in BILLED)
        self._written = True
        if self._dialect.form.of:  # no provider asks money for a count
            ending = ending._replace(billed=False)
        ending = ending._replace(saved=self._saved, version=self._told())
        self._session.write(self._delta, ending, self._started, self._call)
        self._threads.end(self._call, failure)

    def _told(self) -> str:
        """The version of the policy that answered; none where nobody did."""
        if self._answer is None:
            return ""
        return self._version if self._answer.version is None else self._answer.version

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()


def _returned(answer: Answer) -> CIMultiDict[str]:
    answer.headers.update(SERVER)
    return answer.headers


def _is_stream(answer: Answer) -> bool:
    return answer.headers.get("Content-Type", "").lower().startswith("text/event-stream")


async def _whole(answer: Answer) -> bytes:
    pieces: list[bytes] = []  # bound: `LARGEST_REPLY` bytes
    size = 0
    async for piece in answer.pieces():
        size = _bounded(size + len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _bounded(size: int) -> int:
    """The size of an answer so far, if one of that size can be kept in memory."""
    if size > LARGEST_REPLY:
        raise ModelFailed(f"the upstream's reply is larger than {LARGEST_REPLY} bytes", kind="garbage")
    return size


def _garbage(message: str) -> Failure:
    return Failure(where=Where.MODEL, kind="garbage", message=message)
