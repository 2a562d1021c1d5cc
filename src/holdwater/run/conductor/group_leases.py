"""Leases for groups: requested at once for all members, and kept until the group is over.

Members wait for each other, so none may wait for memory while another holds some: a group gets all or
nothing, and the retry of a member takes over its lease. `governor/gate.py` defines leases.
"""

from __future__ import annotations

import asyncio

from ...core.failures import make_interrupt_failure
from ...core.records import Attempt, AttemptFailure, LimitOverrides, Verdict
from ...governor.gate import Lease
from ..resources.governor import Governor


class GroupLeases:
    """The leases of all groups of a run."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
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
                return self._governor.hand_over(group.parked.pop(), attempt, asks)
            return await self._lease_all(group, attempt, asks, images)

    async def _lease_all(
        self, group: _LeasedGroup, attempt: Attempt, asks: LimitOverrides, images: int
    ) -> Lease | AttemptFailure:
        others = [one for one in group.coming if one is not attempt and one.id not in group.gone]
        granted = await self._governor.lease_all((attempt, *others), asks, images)
        if attempt.id in group.gone:
            group.coming.remove(attempt)
            return group.gone.pop(attempt.id)  # the members behind it request their own lease
        group.granted = {one.id: granted for one in others}
        group.coming = [one for one in group.coming if one.id in group.gone]
        return granted

    def cancel_wait(self, attempt: int, reason: str) -> bool:
        """Return whether a member waited for its group's lease; if so, end its wait."""
        group = self._groups.get(self._group_of.get(attempt, 0))
        if group is None or not any(one.id == attempt for one in group.coming):
            return False
        group.gone[attempt] = make_interrupt_failure(reason)
        self._governor.drop(attempt, reason)
        return True

    def keep_lease(self, verdict: Verdict) -> bool:
        """Return whether the verdict is a member's; if so, keep its lease for the group."""
        group = self._groups.get(self._group_of.pop(verdict.attempt, 0))
        if group is None:
            return False
        group.coming = [one for one in group.coming if one.id != verdict.attempt]
        self._governor.retain_lease(verdict)
        group.parked.append(verdict.attempt)
        return True

    def close_group(self, group: int) -> None:
        """Return the leases that the group has kept."""
        known = self._groups.pop(group, None)
        for attempt in known.parked if known is not None else ():
            self._governor.return_lease(attempt)


class _LeasedGroup:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.coming: list[Attempt] = []  # bound: the members of the group, as for the fields below
        self.granted: dict[int, Lease | AttemptFailure] = {}
        self.gone: dict[int, AttemptFailure] = {}
        self.parked: list[int] = []
