"""Calls that wait for a trainer's answer: whose they are, what is asked in them, and who is told.

The calls themselves are held in the worker (`gateway/upstreams/held.py`); here are their names.
"""

from __future__ import annotations

import asyncio

from ..core.serving import Answer, Called
from ..rollout.wire import Answered, Asked, Held, Take, Unheld
from .fleet import Attended, Underway
from .ticket import MemberState, Ticket


class Calls:
    """Of all attempts that run."""

    def __init__(self, fleet: Attended) -> None:
        self._fleet = fleet
        self._owners: dict[int, tuple[Ticket, MemberState]] = {}  # by attempt; bound: the run's concurrency
        self._asking: dict[str, asyncio.Future[Asked | None]] = {}  # bound: streams that are being written

    @property
    def held(self) -> int:
        """How many wait for an answer now."""
        return sum(len(member.calls) for _, member in self._owners.values())

    def belong(self, attempt: int, ticket: Ticket, member: MemberState) -> None:
        """The attempt has begun, for this member."""
        self._owners[attempt] = ticket, member

    def owner(self, attempt: int) -> tuple[Ticket, MemberState] | None:
        return self._owners.get(attempt)

    def hear(self, news: Underway) -> None:
        found = self._owners.get(news.attempt)
        if found is None:
            return
        ticket, member = found
        match news:
            case Held(attempt=attempt, call=number):
                member.calls[_name(attempt, number)] = None
                ticket.change()
            case Unheld(attempt=attempt, call=number):
                member.calls.pop(_name(attempt, number), None)
                self._tell(_name(attempt, number), None)
                ticket.change()
            case Asked(attempt=attempt, call=number):
                self._tell(_name(attempt, number), news if news.dialect else None)

    async def fetch(self, call: str, *, whole: bool, member: int) -> Called | None:
        """What is asked in a call; None when it is not held any more."""
        attempt, number = split(call)
        while (other := self._asking.get(call)) is not None:  # for another connection, which has other calls
            await asyncio.shield(other)
        asking = self._asking[call] = asyncio.get_running_loop().create_future()
        if not self._fleet.send(attempt, Take(attempt=attempt, call=number, whole=whole)):
            self._tell(call, None)
        asked = await asyncio.shield(asking)
        if asked is None:
            return None
        return Called(
            member=member,
            call=call,
            dialect=asked.dialect,
            append=tuple(message.decode() for message in asked.append),
            parent=None if asked.parent is None else _name(attempt, asked.parent),
            keep=asked.keep,
            head=None if asked.head is None else asked.head.decode(),
            streamed=asked.streamed,
        )

    def deliver(self, answer: Answer) -> None:
        attempt, number = split(answer.call)
        self._fleet.send(attempt, Answered(attempt=attempt, call=number, answer=answer))

    def over(self, attempt: int) -> None:
        """The attempt has its verdict: nothing of it is held any more."""
        found = self._owners.pop(attempt, None)
        if found is None:
            return
        ticket, member = found
        for call in list(self._asking):
            if split(call)[0] == attempt:
                self._tell(call, None)
        if member.attempt == attempt:
            member.calls.clear()
        ticket.change()

    def _tell(self, call: str, asked: Asked | None) -> None:
        asking = self._asking.pop(call, None)
        if asking is not None and not asking.done():
            asking.set_result(asked)


def _name(attempt: int, number: int) -> str:
    return f"{attempt}.{number}"


def split(call: str) -> tuple[int, int]:
    attempt, _, number = call.partition(".")
    return int(attempt), int(number)
