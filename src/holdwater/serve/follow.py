"""Tells a client what becomes of its order: not every change, but what is different from what it was told.

So a client that reads slowly is told less often, and nothing waits for it in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..core.serving import KEPT_CALLS, Accepted, Called, Dropped, Finished, Settled, Started, Turned
from .desk import Member, Ticket
from .written import Stream

KEEP_ALIVE = 10.0  # seconds of silence in a stream


class Follower:
    """One client's, of one ticket. `have` are calls of which it still has the request."""

    def __init__(self, ticket: Ticket, stream: Stream, have: Iterable[str] = ()) -> None:
        self._ticket = ticket
        self._stream = stream
        self._have = set(have)  # bound: a header
        self._told: list[_Told] = []  # bound: the members

    async def follow(self) -> None:
        """Until the ticket is finished and its result has been told."""
        ticket = self._ticket
        await self._stream.tell(Accepted(order=ticket.id, new=ticket.new))
        while True:
            seen, finished = ticket.version, ticket.finished
            await self._catch_up()
            if finished:
                await self._stream.tell(Finished(result=await ticket.result()))
                return
            await self._wait(seen)

    def answered(self, call: str) -> None:
        """This client need not be told that nobody waits for the answer any more: there is one."""
        for told in self._told:
            told.calls.discard(call)

    async def _wait(self, seen: int) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._ticket.changed(seen)
                return
            except TimeoutError:
                await self._stream.keep_alive()

    async def _catch_up(self) -> None:
        members = self._ticket.members
        while len(self._told) < len(members):
            self._told.append(_Told())
        for member, told in zip(members, self._told, strict=False):
            await self._tell(member, told)

    async def _tell(self, member: Member, told: _Told) -> None:
        if member.attempt != told.attempt:
            told.attempt, told.turns, told.nodes = member.attempt, 0, 0
            await self._stream.tell(Started(member=member.member, attempt=member.attempt))
        if member.turns != told.turns:
            told.turns = member.turns
            nodes = await self._ticket.nodes(member.member, told.nodes)
            told.nodes += len(nodes)
            turned = Turned(
                member=member.member,
                attempt=told.attempt,
                turns=told.turns,
                usage=member.usage,
                nodes=nodes,
            )
            await self._stream.tell(turned)
        await self._tell_calls(member, told)
        if member.outcome is not None and not told.settled:
            told.settled = True
            settled = Settled(member=member.member, outcome=member.outcome, reward=member.reward)
            await self._stream.tell(settled)

    async def _tell_calls(self, member: Member, told: _Told) -> None:
        held = list(member.calls)
        for call in told.calls.difference(held):
            told.calls.discard(call)
            await self._stream.tell(Dropped(member=member.member, call=call))
        for call in held:
            if call not in told.kept and (called := await self._called(call, told)) is not None:
                told.add(call)
                await self._stream.tell(called)

    async def _called(self, call: str, told: _Told) -> Called | None:
        """What is asked, by what is new in it where the client has the rest."""
        called = await self._ticket.called(call, whole=False)
        parent = called.parent if called is not None else None
        if parent is None or parent in told.kept or parent in self._have:
            return called
        return await self._ticket.called(call, whole=True)


class _Told:
    """What a client was told of a member."""

    def __init__(self) -> None:
        self.attempt = 0
        self.turns = 0
        self.nodes = 0
        self.settled = False
        self.calls: set[str] = set()  # that wait for its answer; bound: what the agent has in flight
        self.kept: dict[str, None] = {}  # that it has the request of; bound: KEPT_CALLS

    def add(self, call: str) -> None:
        self.calls.add(call)
        self.kept[call] = None
        while len(self.kept) > KEPT_CALLS:
            del self.kept[next(iter(self.kept))]
