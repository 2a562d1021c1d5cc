"""Admits attempts: each waits for its lease and its images, is written to the ledger, and becomes a job.

Leases come from the governor; only they are queued. Where the run has containers, the supply provides images
(`run/builds/docker_supply.py`). Their disk is part of the lease until they are on the daemon, and is measured
from then on: images outlive the attempt and are removed when room is needed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ...core.errors import ImageFailed, as_failure, drop_tracebacks
from ...core.failures import make_interrupt_failure
from ...core.records import (
    Attempt,
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    LimitOverrides,
    SandboxSpec,
    Verdict,
)
from ...governor.gate import PAUSE, Lease
from ...governor.leases import AttemptLeases
from ...ledger.ledger import Ledger
from ...rollout.worker_protocol import AttemptJob
from ..orders.order_book import OrderBook
from .replay import EarlierLookup

T = TypeVar("T")


class InstanceLimits(msgspec.Struct):
    """The part of an instance that the conductor always reads."""

    limits: LimitOverrides = LimitOverrides()


class ImageRequest(msgspec.Struct, frozen=True):
    """The part of an instance that says which images it needs, and what else its sandbox needs elsewhere."""

    id: str
    start: SandboxSpec = SandboxSpec()
    grader: SandboxSpec | None = None
    data: dict[str, Any] = {}  # names of images may be derived from it
    refused: str = ""  # why it cannot be tried; it then needs no images
    # Of the attempt; the admission fills them in.
    limits: LimitOverrides = LimitOverrides()
    scale: int = 1
    group: int | None = None
    members: int = 1  # attempts of the group that have leases together

    @property
    def starts(self) -> tuple[SandboxSpec, ...]:
        """The sandbox specs that name an image, one for each key."""
        named = {spec.key: spec for spec in (self.grader, self.start) if spec is not None and spec.key}
        return tuple(named.values())


class ImageSupply(Protocol):
    """Makes images available where sandboxes start."""

    async def estimate_need(self, wanted: ImageRequest) -> int:
        """Return the bytes that these images would add on the daemon's disk."""

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        """Return `SandboxSpec.key` -> the daemon's image, held until `release`. Raises an `AttemptError`."""

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        """End the attempt's hold, if it has one; `failure` is the attempt's."""

    def end_group(self, group: int) -> None:
        """End everything that is held for a group beyond its members' own holds."""

    def expect(self, wanted: ImageRequest) -> None:
        """Announce that an attempt will request these images soon."""

    def stop(self) -> None:
        """Expect no more requests."""


class ReadyJob(NamedTuple):
    """An attempt that can be started."""

    job: AttemptJob
    asks: LimitOverrides  # the limits of its instance and its order


class AttemptAdmission:
    """Admits the attempts of one run. Without a supply, attempts need no images."""

    def __init__(
        self,
        ledger: Ledger,
        leases: AttemptLeases,
        earlier: EarlierLookup,
        supply: ImageSupply | None = None,
        orders: OrderBook | None = None,
    ) -> None:
        self._ledger = ledger
        self._leases = leases
        self._earlier = earlier
        self._supply = supply
        self._orders = orders
        self._groups = _GroupLeases(leases)
        self._fetching: dict[int, asyncio.Timeout] = {}  # attempts waiting for images; bound: the concurrency
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        # attempts not yet admitted -> why they were cancelled, if they were; bound: the concurrency
        self._entering: dict[int, str | None] = {}

    def announce(self, attempt: Attempt) -> None:
        """Announce that `admit` will follow: members of a group that come together get one lease together."""
        self._entering[attempt.id] = None
        self._groups.expect(attempt)

    async def admit(self, attempt: Attempt) -> ReadyJob | AttemptFailure:
        """Wait for lease and images; return the job or the failure. An `interrupted` wait is not recorded.

        The attempt is in the ledger before any worker can start it.
        """
        payload = await self._ledger.payload(attempt.instance)
        asks = msgspec.msgpack.decode(payload, type=InstanceLimits).limits
        terms = None if self._orders is None else self._orders.find_terms(attempt)
        if terms is not None:
            asks = asks.merge(terms.limits)
        self._entering.setdefault(attempt.id, None)
        try:
            granted = await self._grant(attempt, payload, asks)
            if not (isinstance(granted, AttemptFailure) or self._unpaused.is_set()):
                waited = await self._await_supply(attempt.id, self._unpaused.wait())
                granted = waited if isinstance(waited, AttemptFailure) else granted
            granted = self._find_cancellation(attempt.id) or granted
        finally:
            del self._entering[attempt.id]
        if isinstance(granted, AttemptFailure) and granted.where is FailureOrigin.INTERRUPTED:
            return granted
        await self._ledger.begin_attempt(attempt)
        if isinstance(granted, AttemptFailure):
            return granted
        earlier = await self._earlier(attempt, payload)
        if isinstance(earlier, AttemptFailure):
            return earlier
        lease, images = granted
        memory, quota = self._leases.derive_limits(attempt.id, lease)
        job = AttemptJob(
            attempt=attempt,
            payload=payload,
            work=None if attempt.regrades is None else await self._ledger.verdict(attempt.regrades),
            lease=memory,
            quota=quota,
            earlier=earlier,
            images=images,
            offer=terms,
        )
        return ReadyJob(job, asks)

    def pause(self) -> None:
        """Admit no attempt until `unpause`; attempts wait as they are."""
        self._unpaused.clear()
        self._leases.hold(PAUSE)

    def unpause(self) -> None:
        self._unpaused.set()
        self._leases.release(PAUSE)

    def is_waiting(self, attempt: int) -> bool:
        """Return whether the attempt has not been admitted yet."""
        return attempt in self._entering

    def cancel_wait(self, attempt: int, reason: str) -> bool:
        """Return whether the attempt was still waiting; if so, end its wait, and `admit` refuses it."""
        if attempt not in self._entering:
            return False
        self._entering[attempt] = reason
        if (scope := self._fetching.pop(attempt, None)) is not None:
            scope.reschedule(asyncio.get_running_loop().time())
        elif not self._groups.cancel_wait(attempt, reason):
            self._leases.drop(attempt, reason)
        return True

    def on_settled(self, verdict: Verdict) -> None:
        """Release the lease and the images; a group's lease stays until `on_group_closed`."""
        if not self._groups.keep_lease(verdict):
            self._leases.on_settled(verdict)
        if self._supply is not None:
            self._supply.release(verdict.attempt, verdict.failure)

    def on_group_closed(self, group: int) -> None:
        self._groups.close_group(group)
        if self._supply is not None:
            self._supply.end_group(group)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of attempts that have a slot, but not yet a lease or images, by what they wait for."""
        waiting = Counter({self._leases.binds: len(self._leases.waiting)})
        waiting["image" if self._unpaused.is_set() else PAUSE] += len(self._fetching)
        return waiting

    def cancel_all(self, reason: str) -> None:
        """End the wait of all attempts that are not admitted, and expect no more of them."""
        for attempt in (*self._leases.waiting, *self._fetching):
            self.cancel_wait(attempt, reason)
        self.expect_nothing()

    async def expect(self, instances: Iterable[int]) -> None:
        """Announce that these will be tried soon: their images can be fetched while others run."""
        if self._supply is not None:
            for instance in instances:
                payload = await self._ledger.payload(instance)
                self._supply.expect(msgspec.msgpack.decode(payload, type=ImageRequest))

    def expect_nothing(self) -> None:
        if self._supply is not None:
            self._supply.stop()

    async def _grant(
        self, attempt: Attempt, payload: bytes, asks: LimitOverrides
    ) -> tuple[Lease, dict[str, str]] | AttemptFailure:
        """Return its lease and its images (`AttemptJob.images`), or why it cannot have them."""
        wanted = msgspec.msgpack.decode(payload, type=ImageRequest) if self._supply else None
        if self._supply is None or wanted is None or wanted.refused:
            lease = await self._lease(attempt, asks, 0)
            return lease if isinstance(lease, AttemptFailure) else (lease, {})
        leased = await self._lease_with_images(attempt, asks, wanted, self._supply)
        if isinstance(leased, AttemptFailure):
            return leased
        lease, need = leased
        group, members = attempt.group, self._groups.count_members(attempt)
        wanted = msgspec.structs.replace(
            wanted, limits=asks, scale=attempt.scale, group=group, members=members
        )
        images = await self._await_supply(attempt.id, self._supply.hold(attempt.id, wanted))
        self._leases.end_image_lease(attempt.id, need)
        return images if isinstance(images, AttemptFailure) else (lease, images)

    def _find_cancellation(self, attempt: int) -> AttemptFailure | None:
        """Return the failure of a cancelled wait, or None."""
        reason = self._entering[attempt]
        return None if reason is None else make_interrupt_failure(reason)

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
            self._leases.return_lease(attempt.id)
            need = now
        return need

    async def _lease(self, attempt: Attempt, asks: LimitOverrides, images: int) -> Lease | AttemptFailure:
        if attempt.group is not None:
            return await self._groups.lease(attempt, asks, images)
        return self._find_cancellation(attempt.id) or await self._leases.lease(attempt, asks, images)

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


class _GroupLeases:
    """The leases of groups: requested at once for all members, and kept until the group is over.

    Members wait for each other, so none may wait for memory while another holds some: a group gets all or
    nothing, and the retry of a member takes over its lease.
    """

    def __init__(self, leases: AttemptLeases) -> None:
        self._leases = leases
        self._groups: dict[int, _LeasedGroup] = {}  # bound: the run's concurrency
        self._group_of: dict[int, int] = {}  # attempt -> its group; bound: the run's concurrency

    def expect(self, attempt: Attempt) -> None:
        """Announce a member: the first request for a lease covers all members announced by then."""
        if attempt.group is not None:
            self._group_of[attempt.id] = attempt.group
            self._groups.setdefault(attempt.group, _LeasedGroup()).coming.append(attempt)

    async def lease(self, attempt: Attempt, asks: LimitOverrides, images: int) -> Lease | AttemptFailure:
        """Return the member's lease; wait until there is enough for all members."""
        group = self._groups[self._group_of[attempt.id]]
        async with group.turn:
            if attempt.id in group.gone:
                return group.gone.pop(attempt.id)
            if attempt.id in group.granted:
                return group.granted.pop(attempt.id)
            if group.parked:
                group.coming.remove(attempt)
                return self._leases.hand_over(group.parked.pop(), attempt, asks)
            coming = [member for member in group.coming if member.id not in group.gone]
            others = [member for member in coming if member is not attempt]
            granted = await self._leases.lease_all((attempt, *others), asks, images)
            if attempt.id in group.gone:
                group.coming.remove(attempt)
                return group.gone.pop(attempt.id)  # the members behind it request their own lease
            group.size += len(coming)
            group.granted = {member.id: granted for member in others}
            group.coming = [member for member in group.coming if member.id in group.gone]
            return granted

    def count_members(self, attempt: Attempt) -> int:
        """Return the leases of the attempt's group; 1 without a group."""
        return 1 if attempt.group is None else self._groups[attempt.group].size

    def cancel_wait(self, attempt: int, reason: str) -> bool:
        """Return whether a member waited for its group's lease; if so, end its wait."""
        group = self._groups.get(self._group_of.get(attempt, 0))
        if group is None or not any(member.id == attempt for member in group.coming):
            return False
        group.gone[attempt] = make_interrupt_failure(reason)
        self._leases.drop(attempt, reason)
        return True

    def keep_lease(self, verdict: Verdict) -> bool:
        """Return whether the verdict is a member's; if so, keep its lease for the group."""
        group = self._groups.get(self._group_of.pop(verdict.attempt, 0))
        if group is None:
            return False
        group.coming = [member for member in group.coming if member.id != verdict.attempt]
        self._leases.retain_lease(verdict)
        group.parked.append(verdict.attempt)
        return True

    def close_group(self, group: int) -> None:
        """Return the leases that the group has kept."""
        known = self._groups.pop(group, None)
        for attempt in known.parked if known is not None else ():
            self._leases.return_lease(attempt)


class _LeasedGroup:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.coming: list[Attempt] = []  # bound: the members of the group, as for the fields below
        self.granted: dict[int, Lease | AttemptFailure] = {}
        self.gone: dict[int, AttemptFailure] = {}
        self.parked: list[int] = []
        self.size = 0  # leases
