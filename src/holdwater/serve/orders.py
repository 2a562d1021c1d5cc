"""Handles the requests about orders: place, follow, query, answer and cancel them.

The `ServerBackend` makes the decisions; this module turns them into responses. Routes and API keys are in
`rollout_server.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from aiohttp import web

from ..core.errors import RequestRefused
from ..core.serving_protocol import Accepted, CallAnswer, Order, OrderProgress, ProblemDetails
from .backend import OrderT, ServerBackend
from .bodies import SERVER_HEADERS, BoundedBodies, EventWriter, send_body
from .event_stream import OrderFollower
from .wire_format import WireFormat, check_order

MODEL_KEY = "X-Holdwater-Model-Key"
HAVE = "X-Holdwater-Have"
OWNER = web.RequestKey("owner", str)  # a hash that stands for the client's API key
ANSWERS = CallAnswer | tuple[CallAnswer, ...]


class OrderRoutes(Generic[OrderT]):
    """The order requests to one backend. `tasks` owns the work that continues after its client is gone."""

    def __init__(
        self,
        desk: ServerBackend[OrderT],
        bodies: BoundedBodies,
        tasks: asyncio.TaskGroup,
        note: Callable[[str, str], None],
        spool: Path | None,
    ) -> None:
        self._backend = desk
        self._spool = spool
        self._bodies = bodies
        self._tasks = tasks
        self._note = note
        self._followers: dict[int, set[OrderFollower[OrderT]]] = {}  # by order; bound: open connections

    async def place(self, request: web.BaseRequest, speech: WireFormat) -> web.StreamResponse:
        """Place an order; respond with a stream of its events, or with its result when it is over."""
        async with self._bodies.read(request) as body:
            order = speech.decode_order(body)
        del body
        check_order(order)
        ticket = await self._await_placement(order, model_key(request), owner_of(request))
        order = ticket.order  # without the instance that the client sent
        if speech.streamed:
            return await self._stream(request, speech, ticket)
        if order.detached and not ticket.finished:
            return render_status(ticket, speech)
        async with self._backend.follow(ticket):
            seen = ticket.version
            while not ticket.finished:
                seen = await self._backend.wait_for_change(ticket, seen)
            return await self._deliver(request, speech, ticket)

    async def show(self, request: web.BaseRequest, speech: WireFormat, key: str) -> web.StreamResponse:
        """Respond with the result of an order, or with 202 if it is not over."""
        ticket = await self._find(key, owner_of(request))
        if not ticket.finished:
            return render_status(ticket, speech)
        return await self._deliver(request, speech, ticket)

    async def cancel(self, request: web.BaseRequest, speech: WireFormat, key: str) -> web.StreamResponse:
        """Cancel an order. With the parameter `left` it runs again when its key comes again."""
        ticket = await self._find(key, owner_of(request))
        if not ticket.finished:
            left = "left" in request.query
            self._backend.cancel(ticket, f"its client {'left' if left else 'cancelled'} it", left=left)
        return render_status(ticket, speech)

    async def answer(self, request: web.BaseRequest, speech: WireFormat, key: str) -> web.StreamResponse:
        """Answer held calls. For a list of answers, respond with the problem of each answer, or null."""
        async with self._bodies.read(request) as body:
            answers: CallAnswer | tuple[CallAnswer, ...] = speech.decode(body, ANSWERS)
        ticket = await self._find(key, owner_of(request))
        if isinstance(answers, CallAnswer):
            self._take_answer(ticket, answers)
            return web.Response(status=204, headers=SERVER_HEADERS)
        problems = [self._try_answer(ticket, answer) for answer in answers]
        return render_record(problems, speech)

    async def _await_placement(self, order: Order, key: str | None, owner: str) -> OrderT:
        """Place the order; return its handle. A client that disconnects meanwhile starts the grace period."""
        placing: asyncio.Future[OrderT] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._place(order, key, owner, placing))
        try:
            return await placing
        except asyncio.CancelledError:
            if not placing.cancelled() and placing.exception() is None:
                await self._start_grace(placing.result())
            raise

    async def _place(
        self, order: Order, key: str | None, owner: str, placing: asyncio.Future[OrderT]
    ) -> None:
        try:
            ticket = await self._backend.place(order, key, owner)
            if placing.cancelled():
                await self._start_grace(ticket)
            else:
                placing.set_result(ticket)
        except Exception as error:  # boundary: raised again where `placing` is awaited  # noqa: BLE001
            if not placing.cancelled():
                placing.set_exception(error)

    async def _find(self, key: str, owner: str) -> OrderT:
        ticket = await self._backend.find(key, owner)
        if ticket is None:
            raise RequestRefused("unknown", f"no such order: {key[:200]!r}")
        return ticket

    def _take_answer(self, ticket: OrderT, answer: CallAnswer) -> None:
        self._backend.answer(ticket, answer)
        for follower in self._followers.get(ticket.id, ()):
            follower.mark_answered(answer.call)

    def _try_answer(self, ticket: OrderT, answer: CallAnswer) -> ProblemDetails | None:
        try:
            self._take_answer(ticket, answer)
        except RequestRefused as error:
            return problem_of(error)
        return None

    async def _stream(
        self, request: web.BaseRequest, speech: WireFormat, ticket: OrderT
    ) -> web.StreamResponse:
        stream = EventWriter(request, speech, self._spool)
        have = (call.strip() for call in request.headers.get(HAVE, "").split(","))
        follower = OrderFollower(self._backend, ticket, stream, have)
        following = self._followers.setdefault(ticket.id, set())
        following.add(follower)
        try:
            async with self._backend.follow(ticket):
                await stream.begin()
                await follower.follow()
                response = await stream.end()
                await self._confirm_delivery(ticket)
                return response
        finally:
            following.discard(follower)
            if not following:
                self._followers.pop(ticket.id, None)

    async def _deliver(
        self, request: web.BaseRequest, speech: WireFormat, ticket: OrderT
    ) -> web.StreamResponse:
        response = await send_body(
            request, speech.encode(await self._backend.read_result(ticket)), speech.content_type, self._spool
        )
        await self._confirm_delivery(ticket)
        return response

    async def _confirm_delivery(self, ticket: OrderT) -> None:
        """Mark the result as delivered: its bytes are sent, even if the client disconnects now."""
        await asyncio.shield(self._tasks.create_task(self._mark_delivered(ticket)))

    async def _mark_delivered(self, ticket: OrderT) -> None:
        try:
            await self._backend.mark_delivered(ticket)
        except Exception as error:  # boundary: at worst the result is sent again  # noqa: BLE001
            self._note("serve.undelivered", f"order {ticket.id}: {type(error).__name__}: {error}")

    async def _start_grace(self, ticket: OrderT) -> None:
        """Start the grace period of an order that no client follows: it starts when a follower leaves."""
        async with self._backend.follow(ticket):
            pass


def owner_of(request: web.BaseRequest) -> str:
    """Return the owner whose orders the request may see, as set by `RolloutServer`."""
    return request[OWNER]


def model_key(request: web.BaseRequest) -> str | None:
    """Return the API key for a model endpoint; refuse one that cannot be forwarded in a header."""
    key = request.headers.get(MODEL_KEY)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise RequestRefused("invalid", f"`{MODEL_KEY}` must be printable ASCII")
    return key


def problem_of(error: RequestRefused) -> ProblemDetails:
    return ProblemDetails(code=error.code, message=error.message, hint=error.hint, after=error.after)


def render_record(record: object, speech: WireFormat, code: int = 200) -> web.Response:
    """Return a response with a small record."""
    return web.Response(
        status=code,
        body=speech.encode(record),
        headers={**SERVER_HEADERS, "Content-Type": speech.content_type},
    )


def render_status(ticket: OrderProgress, speech: WireFormat) -> web.Response:
    """Return a response that says that the order is known; its status is 202 while the order is not over."""
    return render_record(Accepted(order=ticket.id, new=ticket.new), speech, 200 if ticket.finished else 202)
