"""Handles one call: reads and parses it, and forwards it upstream, or finds its reply in the record.

`answer_delivery.py` delivers the answer and records every outcome. `server.py` checks the key; the dialects
interpret the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw

from ..core.errors import HoldwaterError, ModelFailed
from ..core.exchange import RecordedReply
from ..core.fork_origin import DRIFT
from ..core.records import AttemptFailure, FailureOrigin
from ..dialect.interface import AdaptedRequest, Dialect
from ..dialect.message import DECODE_ERRORS
from .answer_delivery import AnswerDelivery, KeepAlive
from .body import ByteAdmission, RequestBody, RetainedBytes, join_request
from .body_reader import make_oversize_error, read_body
from .call_terms import ModelRoute
from .in_process_calls import IncomingRequest, InProcessRequest
from .recorder import RequestDelta, change_head
from .request_parser import MalformedRequest, ParsedRequest
from .routes import CallRoute, estimate_tokens, pick_headers
from .sessions import Session
from .upstreams import Upstream, UpstreamAnswer, UpstreamCall
from .upstreams.complete_reply import CompleteReply
from .upstreams.retry import ABSENT

KEEP_ALIVE = 15.0  # seconds of silence in mid-stream


class UnsupportedDialect(HoldwaterError):
    """The upstream does not support the client's dialect."""


class PreparedCall(NamedTuple):
    """A request that is ready to be sent upstream."""

    call: UpstreamCall
    delta: RequestDelta
    asked: AdaptedRequest
    requested: int  # tick of its `CallThreads`
    has_tools: bool
    recorded: RecordedReply | None  # in place of an answer of the upstream


class CallRelay:
    """Forwards the calls of all sessions to the session's upstream, or to that of `own` if it has none."""

    def __init__(self, own: ModelRoute, admission: ByteAdmission, body_cap: int, keep_alive: float) -> None:
        self.default_route = own
        self.admission = admission
        self.retention = RetainedBytes(admission.bound)
        self._cap = body_cap
        self._keep_alive = keep_alive

    def resolve_model_route(self, session: Session) -> ModelRoute:
        """Return the route of a call that `session` makes now."""
        return (
            self.default_route
            if session.model_route is None
            else session.model_route.with_defaults(self.default_route)
        )

    async def pass_on(
        self, request: IncomingRequest, session: Session, route: CallRoute
    ) -> web.StreamResponse:
        """Handle a call that is a turn of a conversation."""
        behind = self.resolve_model_route(session)
        _check_dialect(behind, session, route.dialect)
        prepared = await self._prepare(request, session, route, behind)
        return await self._exchange(request, session, route.dialect, behind, prepared)

    async def count(self, request: IncomingRequest, session: Session, route: CallRoute) -> web.StreamResponse:
        """Return a request's token count: the upstream's answer, or an estimate, which is not recorded."""
        counts = route.dialect.counted_dialect
        behind = self.resolve_model_route(session)
        prepared = await self._prepare(request, session, route, behind)
        estimate = estimate_tokens(route.dialect, prepared.call.body.size)
        upstream = behind.upstream
        able = upstream is not None and counts in upstream.counting - session.uncounted
        if prepared.recorded is None and not able:
            prepared.call.body.free()
            return estimate
        response = await self._exchange(request, session, route.dialect, behind, prepared)
        if response.status in ABSENT:  # it cannot count
            session.uncounted.add(counts)
            return estimate
        return estimate if response.status >= 500 else response

    async def _exchange(
        self,
        request: IncomingRequest,
        session: Session,
        dialect: Dialect,
        behind: ModelRoute,
        prepared: PreparedCall,
    ) -> web.StreamResponse:
        """Get the answer to a call, deliver it and record it."""
        call, delta, asked, requested, has_tools, recorded = prepared
        placed = session.find_threads(dialect).begin(requested, delta, call.body.size, has_tools)
        call = call._replace(conversation=placed.thread)
        turn = AnswerDelivery(request, session, delta, dialect, recorded, placed, call.model)
        try:
            async with self._open_answer(call, session, recorded, dialect, behind) as answer:
                turn.set_answer(answer, behind.version)
                if (
                    answer.failure is None
                    and answer.headers.get("Content-Type", "").lower().startswith("text/event-stream")
                    and not isinstance(request, InProcessRequest)
                ):
                    async with KeepAlive(dialect.keep_alive, self._keep_alive) as pulse:
                        return await turn.deliver_stream(answer, dialect.stream(asked), pulse)
                return await turn.deliver_whole(answer)
        except ModelFailed as error:
            return turn.deliver_failure(error)
        except (asyncio.CancelledError, ConnectionError):
            turn.abandon()
            raise
        finally:
            call.body.free()

    def _open_answer(
        self,
        call: UpstreamCall,
        session: Session,
        recorded: RecordedReply | None,
        dialect: Dialect,
        behind: ModelRoute,
    ) -> AbstractAsyncContextManager[UpstreamAnswer]:
        if recorded is not None:
            if recorded.refused:
                raise ModelFailed(recorded.refused, kind=DRIFT, again=False)
            reply, chunks = recorded.reply, recorded.chunks
            answer = CompleteReply(reply, dialect, call.reply_format, recorded.version, chunks)
            answer.original = recorded.original
            return nullcontext(answer)
        assert behind.upstream is not None, "a gateway has an upstream of its own"
        # Without a recording, `Session.turn` has paced the call already.
        return _send_paced(call, session, behind.upstream) if session.replays else behind.upstream.send(call)

    async def _prepare(
        self, request: IncomingRequest, session: Session, route: CallRoute, behind: ModelRoute
    ) -> PreparedCall:
        dialect = route.dialect
        requested = session.find_threads(dialect).tick()
        body, reading = await self._read_request(request, session, dialect)
        try:
            asked, model = _adapt_request(route, reading.head, behind)
            has_tools = bytes(reading.head.get("tools", b"")) not in (b"", b"[]", b"null")
            sent = {**reading.head, **asked.changes}
            if asked.changes:
                body.replace(join_request(dialect.key, msgspec.json.encode(sent), reading.span))
            told = {**asked.recorded_keys, **sent}
            wanted = dialect.read_format(sent, asked.place)
            named = told
            if session.model_route is not None and behind.model is not None:
                # The name of a policy in training changes in mid-conversation.
                named = {key: raw for key, raw in told.items() if key != "model"}
            delta = await session.find_delta(dialect, reading, told, named)
            recorded, changes = session.find_recorded(delta, named)
            if changes:
                told, sent = change_head(told, changes), change_head(sent, changes)
                delta = await session.find_delta(dialect, reading, told, change_head(named, changes))
                if recorded is None:
                    body.replace(join_request(dialect.key, msgspec.json.encode(sent), reading.span))
        except BaseException:  # boundary: releases, then raises again
            body.free()
            raise
        call = _make_call(request, session, asked, route, body)
        turn = None if dialect.counted_dialect else delta
        call = call._replace(reply_format=wanted, delta=turn, model=model)
        return PreparedCall(call, delta, asked, requested, has_tools, recorded)

    async def _read_request(
        self, request: IncomingRequest, session: Session, dialect: Dialect
    ) -> tuple[RequestBody, ParsedRequest]:
        """Return a request's body, and the parsed request."""
        if isinstance(request, InProcessRequest):
            body = request.make_body(dialect.key, self.retention)
            if body.size > self._cap:
                raise make_oversize_error(self._cap)
            return body, request.parse(dialect.key)
        content, admitted = await read_body(request, session.admission, self._cap)
        body = RequestBody((content,), admitted, self.retention)
        try:
            return body, await session.read(dialect, content)
        except BaseException:  # boundary: releases, then raises again
            body.free()
            raise


def _check_dialect(behind: ModelRoute, session: Session, dialect: Dialect) -> None:
    """Fail the call if the upstream does not support its dialect."""
    assert behind.upstream is not None, "a gateway has an upstream of its own"
    known = behind.upstream.dialects
    if dialect.name in known:
        return
    spoken = ", ".join(f"`{name}`" for name in sorted(known)) or "none"
    error = UnsupportedDialect(
        f"the upstream does not support the agent's dialect `{dialect.name}`: it supports {spoken}",
        "use an upstream that supports it, or another dialect in the agent",
    )
    failure = AttemptFailure(
        where=FailureOrigin.RUN, kind="dialect", message=error.message, hint=error.hint, again=False
    )
    if not dialect.auxiliary:
        session.threads.refuse(failure)
    raise error


@asynccontextmanager
async def _send_paced(
    call: UpstreamCall, session: Session, upstream: Upstream
) -> AsyncIterator[UpstreamAnswer]:
    async with session.pace(), upstream.send(call) as answer:
        yield answer


def _adapt_request(
    route: CallRoute, head: dict[str, Raw], behind: ModelRoute
) -> tuple[AdaptedRequest, str | None]:
    """Return the request with the model and the sampling parameters of its route, and that model."""
    dialect, place, model = route.dialect, route.place, behind.model
    if behind.names:
        model = behind.choose_model(dialect.read_model(head, place))
    try:
        asked = dialect.adapt_request(head, place, model)
        changes = dialect.impose_sampling(head, behind.sampling)
    except DECODE_ERRORS as error:
        raise MalformedRequest(str(error)) from None
    if model is None or not dialect.uses_run_model:
        model = dialect.read_model(head, place)
    return asked._replace(changes={**asked.changes, **changes}) if changes else asked, model


def _make_call(
    request: IncomingRequest, session: Session, asked: AdaptedRequest, route: CallRoute, body: RequestBody
) -> UpstreamCall:
    place = asked.place
    if session.key in place.query:  # in any parameter
        kept = [part for part in place.query.split("&") if session.key not in part]
        place = place._replace(query="&".join(kept))
    dialect = route.dialect.upstream_dialect
    headers = pick_headers(request.headers, session.key, route.dialect)
    return UpstreamCall(place.path_and_query, headers, body, session.track_waiting, dialect, session.attempt)
