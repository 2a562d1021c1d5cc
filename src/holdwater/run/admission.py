"""What an attempt has before it starts: a lease, and then the images that its sandboxes start from.

The lease is the governor's and the only thing that waits its turn; the images are the supply's, where the run
has containers. What they take on the disk is part of the lease until they are there, and measured from then
on: they outlive the attempt, and go when room is wanted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from ..core.errors import ImageFailed, as_failure, let_go
from ..core.failures import interrupted
from ..core.records import Ask, Attempt, Failure, Phase, Verdict
from ..governor.gate import Lease
from .governor import Governor
from .together import Together
from .wanted import Supplies, Wanted

T = TypeVar("T")


class Asks(msgspec.Struct):
    """The part of an instance that the conductor reads in any case."""

    limits: Ask = Ask()


class Admission:
    """One run's. Without a supply attempts need no images."""

    def __init__(self, governor: Governor, supply: Supplies | None) -> None:
        self._governor = governor
        self._supply = supply
        self._together = Together(governor)
        self._fetching: dict[int, asyncio.Timeout] = {}  # that wait for images; bound: the concurrency
        # attempts that do not have all yet -> why they were let go; bound: the concurrency
        self._entering: dict[int, str | None] = {}

    def coming(self, attempt: Attempt) -> None:
        """It will be `granted` soon: those of a group that come together are leased for together."""
        self._entering[attempt.id] = None
        self._together.expect(attempt)

    async def granted(
        self, attempt: Attempt, payload: bytes, asks: Ask
    ) -> tuple[Lease, dict[str, str]] | Failure:
        """Its lease and its images (`Job.images`), or why it cannot have them."""
        self._entering.setdefault(attempt.id, None)
        try:
            granted = await self._granted(attempt, payload, asks)
            return self._released(attempt.id) or granted
        finally:
            del self._entering[attempt.id]

    async def _granted(
        self, attempt: Attempt, payload: bytes, asks: Ask
    ) -> tuple[Lease, dict[str, str]] | Failure:
        wanted = msgspec.msgpack.decode(payload, type=Wanted) if self._supply else None
        if self._supply is None or wanted is None or wanted.refused:
            lease = await self._lease(attempt, asks, 0)
            return lease if isinstance(lease, Failure) else (lease, {})
        leased = await self._leased(attempt, asks, wanted, self._supply)
        if isinstance(leased, Failure):
            return leased
        lease, need = leased
        images = await self._fetched(attempt.id, self._supply.hold(attempt.id, wanted))
        self._governor.taken(attempt.id, need)
        return images if isinstance(images, Failure) else (lease, images)

    def let_go(self, attempt: int, reason: str) -> bool:
        """Whether it did not have all that it needs: it waits for that no more, and is not granted it."""
        if attempt not in self._entering:
            return False
        self._entering[attempt] = reason
        if (scope := self._fetching.pop(attempt, None)) is not None:
            scope.reschedule(asyncio.get_running_loop().time())
        elif not self._together.let_go(attempt, reason):
            self._governor.drop(attempt, reason)
        return True

    def _released(self, attempt: int) -> Failure | None:
        """Why it was let go, if it was."""
        reason = self._entering[attempt]
        return None if reason is None else interrupted(reason)

    def settled(self, verdict: Verdict) -> None:
        """Its lease and its images go back; a group's lease stays until `disbanded`."""
        if not self._together.settled(verdict):
            self._governor.settled(verdict)
        if self._supply is not None:
            self._supply.release(verdict.attempt, verdict.failure)

    def disbanded(self, group: int) -> None:
        self._together.over(group)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot and not yet what they need."""
        return (*self._governor.waiting, *self._fetching)

    @property
    def supplied(self) -> bool:
        return self._supply is not None

    def expect(self, payload: bytes) -> None:
        """This instance will be tried soon."""
        if self._supply is not None:
            self._supply.expect(msgspec.msgpack.decode(payload, type=Wanted))

    def expect_nothing(self) -> None:
        if self._supply is not None:
            self._supply.stop()

    async def _leased(
        self, attempt: Attempt, asks: Ask, wanted: Wanted, supply: Supplies
    ) -> tuple[Lease, int] | Failure:
        """Its lease, and the bytes of it that are for images."""
        need = await self._fetched(attempt.id, supply.need(wanted))
        while not isinstance(need, Failure):
            lease = await self._lease(attempt, asks, need)
            if isinstance(lease, Failure):
                return lease
            now = await self._fetched(attempt.id, supply.need(wanted))
            if attempt.group is not None or (not isinstance(now, Failure) and now <= need):
                return lease, need
            self._governor.give(attempt.id)  # what was there when it asked was evicted while it waited
            need = now
        return need

    async def _lease(self, attempt: Attempt, asks: Ask, images: int) -> Lease | Failure:
        if attempt.group is not None:
            return await self._together.lease(attempt, asks, images)
        return self._released(attempt.id) or await self._governor.lease(attempt, asks, images)

    async def _fetched(self, attempt: int, work: Coroutine[Any, Any, T]) -> T | Failure:
        """What the supply gives, or why it does not; being let go ends the wait at once."""
        if released := self._released(attempt):
            work.close()
            return released
        try:
            async with asyncio.timeout(None) as scope:
                self._fetching[attempt] = scope
                return await work
        except Exception as error:  # boundary: an image that fails stops no other attempt  # noqa: BLE001
            if scope.expired() and (released := self._released(attempt)):
                return released
            failure = as_failure(error, ImageFailed, Phase.SETUP)
            let_go(error)
            return failure
        finally:
            self._fetching.pop(attempt, None)
