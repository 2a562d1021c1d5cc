"""Streams the progress of an order to a client: not every change, but the difference to what was sent before.

A client that reads slowly therefore gets fewer events, and no events queue up in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic

from ..core.serving_protocol import (
    KEPT_CALLS,
    Accepted,
    Called,
    Dropped,
    Finished,
    RolloutProgress,
    Settled,
    Started,
    Turned,
)
from .backend import OrderContents, OrderT
from .bodies import EventWriter

KEEP_ALIVE = 10.0  # seconds without an event before a keep-alive


class OrderFollower(Generic[OrderT]):
    """Follows one order for one client. `have` are the calls whose requests the client still has."""

    def __init__(
        self,
        contents: OrderContents[OrderT],
        order: OrderT,
        stream: EventWriter,
        have: Iterable[str] = (),
    ) -> None:
        self._contents = contents
        self._order = order
        self._stream = stream
        self._have = set(have)  # bound: the size of a header
        self._sent: list[_SentState] = []  # bound: the members

    async def follow(self) -> None:
        """Send events until the order is finished and its result has been sent."""
        order = self._order
        await self._stream.write_event(Accepted(order=order.id, new=order.new))
        while True:
            seen, finished = order.version, order.finished
            await self._catch_up()
            if finished:
                await self._stream.write_event(Finished(result=await self._contents.read_result(order)))
                return
            await self._wait(seen)

    def mark_answered(self, call: str) -> None:
        """Send no `Dropped` event for this call: it has been answered."""
        for told in self._sent:
            told.calls.discard(call)

    async def _wait(self, seen: int) -> None:
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await self._contents.wait_for_change(self._order, seen)
                return
            except TimeoutError:
                await self._stream.keep_alive()

    async def _catch_up(self) -> None:
        members = self._order.members
        while len(self._sent) < len(members):
            self._sent.append(_SentState())
        for member, told in zip(members, self._sent, strict=False):
            await self._tell(member, told)

    async def _tell(self, member: RolloutProgress, told: _SentState) -> None:
        if member.attempt != told.attempt:
            told.attempt, told.turns, told.nodes = member.attempt, 0, 0
            await self._stream.write_event(Started(member=member.member, attempt=member.attempt))
        if member.turns != told.turns:
            told.turns = member.turns
            nodes = await self._contents.read_nodes(self._order, member.member, told.nodes)
            told.nodes += len(nodes)
            turned = Turned(
                member=member.member,
                attempt=told.attempt,
                turns=told.turns,
                usage=member.usage,
                nodes=nodes,
            )
            await self._stream.write_event(turned)
        await self._tell_calls(member, told)
        if member.outcome is not None and not told.settled:
            told.settled = True
            settled = Settled(member=member.member, outcome=member.outcome, reward=member.reward)
            await self._stream.write_event(settled)

    async def _tell_calls(self, member: RolloutProgress, told: _SentState) -> None:
        held = list(member.calls)
        for call in told.calls.difference(held):
            told.calls.discard(call)
            await self._stream.write_event(Dropped(member=member.member, call=call))
        for call in held:
            if call not in told.kept and (called := await self._fetch_call(call, told)) is not None:
                told.add(call)
                await self._stream.write_event(called)

    async def _fetch_call(self, call: str, told: _SentState) -> Called | None:
        """Fetch the content of a call: only its new messages if the client has the call that it continues."""
        called = await self._contents.fetch_call(self._order, call, whole=False)
        parent = called.parent if called is not None else None
        if parent is None or parent in told.kept or parent in self._have:
            return called
        return await self._contents.fetch_call(self._order, call, whole=True)


class _SentState:
    """The state of a member as last sent to the client."""

    def __init__(self) -> None:
        self.attempt = 0
        self.turns = 0
        self.nodes = 0
        self.settled = False
        self.calls: set[str] = set()  # calls that wait for an answer; bound: the agent's calls in flight
        self.kept: dict[str, None] = {}  # calls whose requests the client has; bound: KEPT_CALLS

    def add(self, call: str) -> None:
        self.calls.add(call)
        self.kept[call] = None
        while len(self.kept) > KEPT_CALLS:
            del self.kept[next(iter(self.kept))]
