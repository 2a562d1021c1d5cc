"""The leases of a group's places on a sandbox server: requested at once, and kept until the group is over.

Members of a group wait for each other. If each waited for a place of its own, two groups with half of their
places each would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...core.records import Attempt, AttemptFailure, LimitOverrides, Verdict
from ...governor.gate import Lease
from ...governor.leases import AttemptLeases


class GroupLeases:
    """The leases of one group. A lease that a place gives back is for the next try of a member."""

    def __init__(self, leases: AttemptLeases, number_place: Callable[[], Attempt]) -> None:
        self._leases = leases
        self._number_place = number_place
        self._turn = asyncio.Lock()
        self._used: set[int] = set()  # numbers of places with a lease; bound: the members, as for the next
        self._free: list[int] = []  # numbers whose lease no place uses
        self._over = False

    async def lease(
        self, place: Attempt, asks: LimitOverrides, images: int, members: int
    ) -> Lease | AttemptFailure:
        """Return the lease of one place; the first request waits for the leases of all members."""
        async with self._turn:
            if self._free:
                granted: Lease | AttemptFailure = self._leases.hand_over(self._free.pop(), place, asks)
            else:
                granted = await self._lease_all(place, asks, images, members)
            if isinstance(granted, Lease):
                self._used.add(place.id)
            return granted

    def take_back(self, verdict: Verdict) -> None:
        """Take the lease of a place back, and keep it for the next place until the group is over."""
        if self._over or verdict.attempt not in self._used:
            self._leases.on_settled(verdict)
        else:
            self._leases.retain_lease(verdict)
            self._free.append(verdict.attempt)
        self._used.discard(verdict.attempt)

    def close(self) -> None:
        """Return the leases that no place uses, now and later."""
        self._over = True
        while self._free:
            self._leases.return_lease(self._free.pop())

    async def _lease_all(
        self, place: Attempt, asks: LimitOverrides, images: int, members: int
    ) -> Lease | AttemptFailure:
        others = [self._number_place() for _ in range(len(self._used) + 1, members)]
        granted: Lease | AttemptFailure | None = None
        try:
            granted = await self._leases.lease_all((place, *others), asks, images)
        finally:
            if not isinstance(granted, Lease):
                for other in others:
                    self._leases.return_lease(other.id)
        if isinstance(granted, Lease):
            self._free += [other.id for other in others]
        return granted
