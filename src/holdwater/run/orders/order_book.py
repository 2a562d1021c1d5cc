"""Keeps the orders that a server has accepted, and follows their attempts from the offer to the outcome.

The scheduler tells the book of each event of an ordered attempt; `order_service.py` adds and removes orders.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import msgspec

from ...core.config import RunConfig, ServingConfig
from ...core.errors import RequestRefused
from ...core.events import SampleOpened
from ...core.failures import DISK
from ...core.records import Attempt, FailureOrigin, Outcome, Verdict
from ...core.serving_protocol import CallAnswer, Called, RolloutProgress
from ...ledger.ledger import Ledger
from ...ledger.orders import OrderRow
from ...rollout.worker_protocol import (
    AnswerHeldCall,
    AttemptProgress,
    CallHeld,
    CallReleased,
    FetchHeldCall,
    HeldCallContent,
    OrderTerms,
)
from ..fleet.interface import AttemptUpdate, ServingFleet
from .active_order import ActiveOrder
from .stats import ServerStatistics
from .token_statistics import TokenStatistics

BUSY_SECONDS = 1.0  # before a retry is worthwhile


class OrderBook:
    """The orders of one server that are in memory."""

    def __init__(
        self, config: RunConfig, ledger: Ledger, fleet: ServingFleet, outcomes: Mapping[str, int]
    ) -> None:
        """`outcomes`: those that the run had before this server began."""
        self._queue = (config.serving or ServingConfig()).queue
        self._ledger = ledger
        self._fleet = fleet
        self.statistics = ServerStatistics(time.time(), outcomes)
        self.tokens = TokenStatistics()
        self.calls = HeldCalls(fleet)
        self.by_key: dict[str, ActiveOrder] = {}  # bound: `serving.queue` rollouts
        self.parked: dict[str, OrderRow] = {}  # by key: left by an earlier conductor; bound: the same
        self._by_sample: dict[tuple[int, int], ActiveOrder] = {}  # by instance and sample; bound: the same
        self._by_order: dict[int, ActiveOrder] = {}  # bound: the same
        self.draining = False  # no more orders are accepted
        self.open_rollouts = 0  # of all active orders

    # Called by the order service.

    def drain(self) -> None:
        """Accept no more orders."""
        self.draining = True

    @property
    def over(self) -> bool:
        """Whether no more orders are accepted, and none is open."""
        return self.draining and not self.by_key and not self.parked

    @contextmanager
    def reserve(self, places: int) -> Iterator[None]:
        """Reserve room for this many rollouts; it is given back only if the block raises."""
        if self.open_rollouts + places > self._queue:
            raise RequestRefused(
                "busy",
                f"{self.open_rollouts} rollouts are open, the limit is {self._queue}",
                after=BUSY_SECONDS,
            )
        self.open_rollouts += places
        try:
            yield
        except BaseException:  # boundary: give the room back, then re-raise
            self.open_rollouts -= places
            raise

    def count_rollouts(self, count: int) -> None:
        """Count the rollouts of an order that has been accepted before, also beyond the limit."""
        self.open_rollouts += count

    def take_parked(self) -> list[OrderRow]:
        """Remove and return the orders of an earlier conductor whose clients have not come back."""
        rows = list(self.parked.values())
        self.parked.clear()
        return rows

    def open(self, order: ActiveOrder) -> None:
        """Follow the attempts of every rollout of the order that is not closed."""
        self._by_order[order.id] = order
        for member in order.members:
            if member.outcome is None:
                self._by_sample[order.row.instance, member.sample] = order

    def forget(self, order: ActiveOrder) -> None:
        if self.by_key.get(order.order.key) is order:
            del self.by_key[order.order.key]
            self.open_rollouts -= order.rollout_count
        self._by_order.pop(order.id, None)

    # Called by the scheduler.

    def find_terms(self, attempt: Attempt) -> OrderTerms | None:
        """Return the terms that an ordered attempt runs under."""
        order = self._by_sample.get((attempt.instance, attempt.sample))
        return None if order is None else order.offer

    def on_started(self, attempt: Attempt) -> None:
        order = self._by_sample.get((attempt.instance, attempt.sample))
        if order is None:
            return
        member = order.find_member(attempt.sample)
        if not member.attempt:
            self.statistics.count_start(time.time() - order.row.at)
        member.begin(attempt.id)
        self.calls.assign(attempt.id, order, member)
        order.notify_change()

    def on_update(self, update: AttemptUpdate) -> None:
        match update:
            case AttemptProgress(attempt=attempt, turns=turns, usage=usage):
                if (owner := self.calls.find_owner(attempt)) is not None:
                    order, member = owner
                    member.advance(turns, usage)
                    order.notify_change()
            case _:
                self.calls.handle_update(update)

    def on_settled(self, verdict: Verdict) -> None:
        self.calls.end_attempt(verdict.attempt)

    def on_closed(self, outcome: Outcome) -> None:
        order = self._by_sample.pop((outcome.instance, outcome.sample), None)
        if order is None:
            return
        order.close(outcome)
        now = time.time()
        self.statistics.count_finish(now, now - order.row.at, outcome.kind)
        if order.finished and not order.followers:
            self.forget(order)

    def expect_replacement(self, group: int) -> None:
        """Announce that a member failed for good and `replace_member` follows."""
        self._by_order[group].expect_replacement()

    async def replace_member(self, group: int, instance: int) -> SampleOpened:
        """Add another sample to the group; return it, to be opened."""
        order = self._by_order[group]
        sample = await self._ledger.add_member(group, instance, len(order.members))
        order.add_replacement(sample)
        self.open_rollouts += 1
        self._by_sample[instance, sample] = order
        return SampleOpened(instance=instance, sample=sample, group=order.membership)


class HeldCalls:
    """The model calls of all running attempts that wait for a trainer's answer.

    Workers hold the calls themselves (`gateway/upstreams/held_calls.py`); here are only their names.
    """

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

    def assign(self, attempt: int, order: ActiveOrder, member: RolloutProgress) -> None:
        """Assign a started attempt to this member."""
        self._owners[attempt] = order, member

    def find_owner(self, attempt: int) -> tuple[ActiveOrder, RolloutProgress] | None:
        return self._owners.get(attempt)

    def handle_update(self, update: AttemptUpdate) -> None:
        found = self._owners.get(update.attempt)
        if found is None:
            return
        order, member = found
        match update:
            case CallHeld(attempt=attempt, call=number):
                member.calls[_name_call(attempt, number)] = None
                order.notify_change()
            case CallReleased(attempt=attempt, call=number):
                member.calls.pop(_name_call(attempt, number), None)
                self._finish_fetch(_name_call(attempt, number), None)
                order.notify_change()
            case HeldCallContent(attempt=attempt, call=number):
                self._finish_fetch(_name_call(attempt, number), update if update.dialect else None)

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
        order, member = found
        for call in list(self._fetching):
            if split_call(call)[0] == attempt:
                self._finish_fetch(call, None)
        if member.attempt == attempt:
            member.calls.clear()
        order.notify_change()

    def _finish_fetch(self, call: str, asked: HeldCallContent | None) -> None:
        asking = self._fetching.pop(call, None)
        if asking is not None and not asking.done():
            asking.set_result(asked)


def _name_call(attempt: int, number: int) -> str:
    return f"{attempt}.{number}"


def split_call(call: str) -> tuple[int, int]:
    attempt, _, number = call.partition(".")
    return int(attempt), int(number)


def confine_failure(verdict: Verdict) -> Verdict:
    """Return the verdict with a run-level failure reduced to a failure of this order's model alone.

    One order's model must not stop the other orders. Failures of the disk stay run-level: they concern all
    orders.
    """
    failure = verdict.failure
    if failure is None or failure.where is not FailureOrigin.RUN or failure.kind in (DISK, "record"):
        return verdict
    return msgspec.structs.replace(
        verdict, failure=msgspec.structs.replace(failure, where=FailureOrigin.MODEL)
    )
