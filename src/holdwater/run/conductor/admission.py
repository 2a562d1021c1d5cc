"""Admits attempts: each gets a lease, then the images of its sandboxes, before it starts.

The governor grants leases; only they are queued. Where the run has containers, the supply provides images.
Their disk is part of the lease until they are on the daemon, and is measured from then on: images outlive the
attempt and are removed when room is needed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from ...core.errors import ImageFailed, as_failure, drop_tracebacks
from ...core.failures import make_interrupt_failure
from ...core.records import Attempt, AttemptFailure, AttemptPhase, LimitOverrides, Verdict
from ...governor.gate import Lease
from ..resources.governor import Governor
from .group_leases import GroupLeases
from .image_request import ImageRequest, ImageSupply

T = TypeVar("T")


class InstanceLimits(msgspec.Struct):
    """The part of an instance that the conductor always reads."""

    limits: LimitOverrides = LimitOverrides()


class AttemptAdmission:
    """Admits the attempts of one run. Without a supply, attempts need no images."""

    def __init__(self, governor: Governor, supply: ImageSupply | None) -> None:
        self._governor = governor
        self._supply = supply
        self._group_leases = GroupLeases(governor)
        self._fetching: dict[int, asyncio.Timeout] = {}  # attempts waiting for images; bound: the concurrency
        # attempts not yet admitted -> why they were cancelled, if they were; bound: the concurrency
        self._entering: dict[int, str | None] = {}

    def announce(self, attempt: Attempt) -> None:
        """Announce that `grant` will follow: members of a group that come together get one lease together."""
        self._entering[attempt.id] = None
        self._group_leases.expect(attempt)

    async def grant(
        self, attempt: Attempt, payload: bytes, asks: LimitOverrides
    ) -> tuple[Lease, dict[str, str]] | AttemptFailure:
        """Return its lease and its images (`AttemptJob.images`), or why it cannot have them."""
        self._entering.setdefault(attempt.id, None)
        try:
            granted = await self._grant(attempt, payload, asks)
            return self._find_cancellation(attempt.id) or granted
        finally:
            del self._entering[attempt.id]

    async def _grant(
        self, attempt: Attempt, payload: bytes, asks: LimitOverrides
    ) -> tuple[Lease, dict[str, str]] | AttemptFailure:
        wanted = msgspec.msgpack.decode(payload, type=ImageRequest) if self._supply else None
        if self._supply is None or wanted is None or wanted.refused:
            lease = await self._lease(attempt, asks, 0)
            return lease if isinstance(lease, AttemptFailure) else (lease, {})
        leased = await self._lease_with_images(attempt, asks, wanted, self._supply)
        if isinstance(leased, AttemptFailure):
            return leased
        lease, need = leased
        images = await self._await_supply(attempt.id, self._supply.hold(attempt.id, wanted))
        self._governor.end_image_lease(attempt.id, need)
        return images if isinstance(images, AttemptFailure) else (lease, images)

    def cancel_wait(self, attempt: int, reason: str) -> bool:
        """Return whether the attempt was still waiting; if so, end its wait, and `grant` refuses it."""
        if attempt not in self._entering:
            return False
        self._entering[attempt] = reason
        if (scope := self._fetching.pop(attempt, None)) is not None:
            scope.reschedule(asyncio.get_running_loop().time())
        elif not self._group_leases.cancel_wait(attempt, reason):
            self._governor.drop(attempt, reason)
        return True

    def _find_cancellation(self, attempt: int) -> AttemptFailure | None:
        """Return the failure of a cancelled wait, or None."""
        reason = self._entering[attempt]
        return None if reason is None else make_interrupt_failure(reason)

    def on_settled(self, verdict: Verdict) -> None:
        """Release the lease and the images; a group's lease stays until `on_group_closed`."""
        if not self._group_leases.keep_lease(verdict):
            self._governor.on_settled(verdict)
        if self._supply is not None:
            self._supply.release(verdict.attempt, verdict.failure)

    def on_group_closed(self, group: int) -> None:
        self._group_leases.close_group(group)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The attempts that have a slot but not yet a lease or images."""
        return (*self._governor.waiting, *self._fetching)

    @property
    def supplied(self) -> bool:
        return self._supply is not None

    def expect(self, payload: bytes) -> None:
        """Announce that this instance will be tried soon."""
        if self._supply is not None:
            self._supply.expect(msgspec.msgpack.decode(payload, type=ImageRequest))

    def expect_nothing(self) -> None:
        if self._supply is not None:
            self._supply.stop()

    async def _lease_with_images(
        self, attempt: Attempt, asks: LimitOverrides, wanted: ImageRequest, supply: ImageSupply
    ) -> tuple[Lease, int] | AttemptFailure:
        """Return the lease, and the bytes of it that are for images."""
        need = await self._await_supply(attempt.id, supply.estimate_need(wanted))
        while not isinstance(need, AttemptFailure):
            lease = await self._lease(attempt, asks, need)
            if isinstance(lease, AttemptFailure):
                return lease
            now = await self._await_supply(attempt.id, supply.estimate_need(wanted))
            if attempt.group is not None or (not isinstance(now, AttemptFailure) and now <= need):
                return lease, need
            # An image that was present at the estimate was evicted while the attempt waited.
            self._governor.return_lease(attempt.id)
            need = now
        return need

    async def _lease(self, attempt: Attempt, asks: LimitOverrides, images: int) -> Lease | AttemptFailure:
        if attempt.group is not None:
            return await self._group_leases.lease(attempt, asks, images)
        return self._find_cancellation(attempt.id) or await self._governor.lease(attempt, asks, images)

    async def _await_supply(self, attempt: int, work: Coroutine[Any, Any, T]) -> T | AttemptFailure:
        """Return the supply's result or the failure; a cancelled wait ends at once."""
        if released := self._find_cancellation(attempt):
            work.close()
            return released
        try:
            async with asyncio.timeout(None) as scope:
                self._fetching[attempt] = scope
                return await work
        except Exception as error:  # boundary: an image that fails stops no other attempt  # noqa: BLE001
            if scope.expired() and (released := self._find_cancellation(attempt)):
                return released
            failure = as_failure(error, ImageFailed, AttemptPhase.SETUP)
            drop_tracebacks(error)
            return failure
        finally:
            self._fetching.pop(attempt, None)
