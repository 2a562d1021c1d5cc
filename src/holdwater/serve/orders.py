"""What clients do with orders: place, follow, ask after, answer and cancel them.

The desk decides; here is only how that is told. Routes and keys are in `door.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ..core.errors import Refused
from ..core.serving import Accepted, Answer, Order, Problem
from .asked import check
from .body import Bodies
from .desk import Desk, Ticket
from .follow import Follower
from .speech import Speech
from .written import SERVER, Stream, send

MODEL_KEY = "X-Holdwater-Model-Key"
HAVE = "X-Holdwater-Have"
OWNER = web.RequestKey("owner", str)  # stands for the key of a request's client
ANSWERS = Answer | tuple[Answer, ...]


class Orders:
    """Of one desk. `tasks` is the scope of what goes on when its client is gone."""

    def __init__(
        self,
        desk: Desk,
        bodies: Bodies,
        tasks: asyncio.TaskGroup,
        note: Callable[[str, str], None],
        spool: Path | None,
    ) -> None:
        self._desk = desk
        self._spool = spool
        self._bodies = bodies
        self._tasks = tasks
        self._note = note
        self._followers: dict[int, set[Follower]] = {}  # by ticket; bound: open connections

    async def place(self, request: web.BaseRequest, speech: Speech) -> web.StreamResponse:
        """Take an order and tell what becomes of it: as a stream, or its result when it is over."""
        async with self._bodies.read(request) as body:
            order = speech.decode_order(body)
        del body
        check(order)
        ticket = await self._placed(order, model_key(request), owner_of(request))
        order = ticket.order  # without the instance that it brought
        if speech.streamed:
            return await self._stream(request, speech, ticket)
        if order.detached and not ticket.finished:
            return status(ticket, speech)
        async with ticket.attended():
            seen = ticket.version
            while not ticket.finished:
                seen = await ticket.changed(seen)
            return await self._deliver(request, speech, ticket)

    async def show(self, request: web.BaseRequest, speech: Speech, key: str) -> web.StreamResponse:
        """The result of an order, or that it is not over."""
        ticket = await self._find(key, owner_of(request))
        if not ticket.finished:
            return status(ticket, speech)
        return await self._deliver(request, speech, ticket)

    async def cancel(self, request: web.BaseRequest, speech: Speech, key: str) -> web.StreamResponse:
        ticket = await self._find(key, owner_of(request))
        if not ticket.finished:
            ticket.cancel("its client cancelled it")
        return status(ticket, speech)

    async def answer(self, request: web.BaseRequest, speech: Speech, key: str) -> web.StreamResponse:
        """Hand answers to the calls that wait for them; of several, say for each why it was not taken."""
        async with self._bodies.read(request) as body:
            answers: Answer | tuple[Answer, ...] = speech.decode(body, ANSWERS)
        ticket = await self._find(key, owner_of(request))
        if isinstance(answers, Answer):
            self._take(ticket, answers)
            return web.Response(status=204, headers=SERVER)
        problems = [self._tried(ticket, answer) for answer in answers]
        return document(problems, speech)

    async def _placed(self, order: Order, key: str | None, owner: str) -> Ticket:
        """The order's ticket. A client that hangs up meanwhile is one that is gone: the desk is told that."""
        placing: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._tasks.create_task(self._place(order, key, owner, placing))
        try:
            return await placing
        except asyncio.CancelledError:
            if not placing.cancelled() and placing.exception() is None:
                await _leave(placing.result())
            raise

    async def _place(
        self, order: Order, key: str | None, owner: str, placing: asyncio.Future[Ticket]
    ) -> None:
        try:
            ticket = await self._desk.place(order, key, owner)
            if placing.cancelled():
                await _leave(ticket)
            else:
                placing.set_result(ticket)
        except Exception as error:  # boundary: raised again where it is awaited  # noqa: BLE001
            if not placing.cancelled():
                placing.set_exception(error)

    async def _find(self, key: str, owner: str) -> Ticket:
        ticket = await self._desk.find(key, owner)
        if ticket is None:
            raise Refused("unknown", f"no such order: {key[:200]!r}")
        return ticket

    def _take(self, ticket: Ticket, answer: Answer) -> None:
        ticket.answer(answer)
        for follower in self._followers.get(ticket.id, ()):
            follower.answered(answer.call)

    def _tried(self, ticket: Ticket, answer: Answer) -> Problem | None:
        try:
            self._take(ticket, answer)
        except Refused as error:
            return problem_of(error)
        return None

    async def _stream(self, request: web.BaseRequest, speech: Speech, ticket: Ticket) -> web.StreamResponse:
        stream = Stream(request, speech, self._spool)
        have = (call.strip() for call in request.headers.get(HAVE, "").split(","))
        follower = Follower(ticket, stream, have)
        following = self._followers.setdefault(ticket.id, set())
        following.add(follower)
        try:
            async with ticket.attended():
                await stream.begin()
                await follower.follow()
                response = await stream.end()
                await self._delivered(ticket)
                return response
        finally:
            following.discard(follower)
            if not following:
                self._followers.pop(ticket.id, None)

    async def _deliver(self, request: web.BaseRequest, speech: Speech, ticket: Ticket) -> web.StreamResponse:
        response = await send(request, speech.encode(await ticket.result()), speech.kind, self._spool)
        await self._delivered(ticket)
        return response

    async def _delivered(self, ticket: Ticket) -> None:
        """Its bytes are on their way: a client that hangs up now does not make it undelivered."""
        await asyncio.shield(self._tasks.create_task(self._mark(ticket)))

    async def _mark(self, ticket: Ticket) -> None:
        try:
            await ticket.delivered()
        except Exception as error:  # boundary: it would be sent as new again, no more  # noqa: BLE001
            self._note("serve.undelivered", f"order {ticket.id}: {type(error).__name__}: {error}")


async def _leave(ticket: Ticket) -> None:
    """Nobody waits for it: from now on the desk counts the seconds."""
    async with ticket.attended():
        pass


def owner_of(request: web.BaseRequest) -> str:
    """Whose orders the request may see: the door has set it."""
    return request[OWNER]


def model_key(request: web.BaseRequest) -> str | None:
    """The key of an endpoint, which is passed on in a header: what cannot stand in one is refused."""
    key = request.headers.get(MODEL_KEY)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise Refused("invalid", f"`{MODEL_KEY}` must be printable ASCII")
    return key


def problem_of(error: Refused) -> Problem:
    return Problem(code=error.code, message=error.message, hint=error.hint, after=error.after)


def document(record: object, speech: Speech, code: int = 200) -> web.Response:
    """A small record as an answer."""
    return web.Response(
        status=code, body=speech.encode(record), headers={**SERVER, "Content-Type": speech.kind}
    )


def status(ticket: Ticket, speech: Speech) -> web.Response:
    """That an order is known: 202 while it is not over."""
    return document(Accepted(order=ticket.id, new=ticket.new), speech, 200 if ticket.finished else 202)
