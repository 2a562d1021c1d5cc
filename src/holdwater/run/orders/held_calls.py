"""Tracks model calls that wait for a trainer's answer: their orders, and their contents on request.

Workers hold the calls themselves (`gateway/upstreams/held_calls.py`); here are only their names.
"""

from __future__ import annotations

import asyncio

from ...core.serving_protocol import CallAnswer, Called
from ...rollout.worker_protocol import AnswerHeldCall, CallHeld, CallReleased, FetchHeldCall, HeldCallContent
from ..fleet.interface import AttemptUpdate, ServingFleet
from .active_order import ActiveOrder, RolloutProgress


class HeldCalls:
    """The held calls of all running attempts."""

    def __init__(self, fleet: ServingFleet) -> None:
        self._fleet = fleet
        # By attempt; bound: the run's concurrency.
        self._owners: dict[int, tuple[ActiveOrder, RolloutProgress]] = {}
        # Bound: the streams that are being written.
        self._fetching: dict[str, asyncio.Future[HeldCallContent | None]] = {}

    @property
    def held_count(self) -> int:
        """The number of calls that wait for an answer now."""
        return sum(len(member.calls) for _, member in self._owners.values())

    def assign(self, attempt: int, ticket: ActiveOrder, member: RolloutProgress) -> None:
        """Assign a started attempt to this member."""
        self._owners[attempt] = ticket, member

    def find_owner(self, attempt: int) -> tuple[ActiveOrder, RolloutProgress] | None:
        return self._owners.get(attempt)

    def handle_update(self, news: AttemptUpdate) -> None:
        found = self._owners.get(news.attempt)
        if found is None:
            return
        ticket, member = found
        match news:
            case CallHeld(attempt=attempt, call=number):
                member.calls[_name_call(attempt, number)] = None
                ticket.notify_change()
            case CallReleased(attempt=attempt, call=number):
                member.calls.pop(_name_call(attempt, number), None)
                self._finish_fetch(_name_call(attempt, number), None)
                ticket.notify_change()
            case HeldCallContent(attempt=attempt, call=number):
                self._finish_fetch(_name_call(attempt, number), news if news.dialect else None)

    async def fetch_call(self, call: str, *, whole: bool, member: int) -> Called | None:
        """Return the request of a call; None when it is not held any more."""
        attempt, number = split_call(call)
        # Another connection is fetching this call, and may need other content: it has received other calls.
        while (other := self._fetching.get(call)) is not None:
            await asyncio.shield(other)
        asking = self._fetching[call] = asyncio.get_running_loop().create_future()
        if not self._fleet.send(attempt, FetchHeldCall(attempt=attempt, call=number, whole=whole)):
            self._finish_fetch(call, None)
        asked = await asyncio.shield(asking)
        if asked is None:
            return None
        return Called(
            member=member,
            call=call,
            dialect=asked.dialect,
            append=tuple(message.decode() for message in asked.append),
            parent=None if asked.parent is None else _name_call(attempt, asked.parent),
            keep=asked.keep,
            head=None if asked.head is None else asked.head.decode(),
            streamed=asked.streamed,
        )

    def deliver_answer(self, answer: CallAnswer) -> None:
        attempt, number = split_call(answer.call)
        self._fleet.send(attempt, AnswerHeldCall(attempt=attempt, call=number, answer=answer))

    def end_attempt(self, attempt: int) -> None:
        """End an attempt that has its verdict: none of its calls is held any more."""
        found = self._owners.pop(attempt, None)
        if found is None:
            return
        ticket, member = found
        for call in list(self._fetching):
            if split_call(call)[0] == attempt:
                self._finish_fetch(call, None)
        if member.attempt == attempt:
            member.calls.clear()
        ticket.notify_change()

    def _finish_fetch(self, call: str, asked: HeldCallContent | None) -> None:
        asking = self._fetching.pop(call, None)
        if asking is not None and not asking.done():
            asking.set_result(asked)


def _name_call(attempt: int, number: int) -> str:
    return f"{attempt}.{number}"


def split_call(call: str) -> tuple[int, int]:
    attempt, _, number = call.partition(".")
    return int(attempt), int(number)
