"""The leases of groups: asked for at once for all members, and kept until the group is over.

Members wait for each other, so none may wait for memory while another one holds some: a group gets all or
nothing, and a member that is tried again takes over what it had. What a lease is: `governor/gate.py`.
"""

from __future__ import annotations

import asyncio

from ..core.failures import interrupted
from ..core.records import Ask, Attempt, Failure, Verdict
from ..governor.gate import Lease
from .governor import Governor


class Together:
    """Of all groups of a run."""

    def __init__(self, governor: Governor) -> None:
        self._governor = governor
        self._groups: dict[int, _Group] = {}  # bound: the run's concurrency
        self._group_of: dict[int, int] = {}  # attempt -> its group; bound: the run's concurrency

    def expect(self, attempt: Attempt) -> None:
        """A member is about to ask: all that are expected when the first one asks are asked for."""
        if attempt.group is not None:
            self._group_of[attempt.id] = attempt.group
            self._groups.setdefault(attempt.group, _Group()).coming.append(attempt)

    async def lease(self, attempt: Attempt, asks: Ask, images: int) -> Lease | Failure:
        """What the member has; waits until there is enough for all."""
        group = self._groups[self._group_of[attempt.id]]
        async with group.turn:
            if attempt.id in group.gone:
                return group.gone.pop(attempt.id)
            if attempt.id in group.granted:
                return group.granted.pop(attempt.id)
            if group.parked:
                group.coming.remove(attempt)
                return self._governor.hand_over(group.parked.pop(), attempt, asks)
            return await self._ask(group, attempt, asks, images)

    async def _ask(self, group: _Group, attempt: Attempt, asks: Ask, images: int) -> Lease | Failure:
        others = [one for one in group.coming if one is not attempt and one.id not in group.gone]
        granted = await self._governor.lease_all((attempt, *others), asks, images)
        if attempt.id in group.gone:
            group.coming.remove(attempt)
            return group.gone.pop(attempt.id)  # those behind it ask for themselves
        group.granted = {one.id: granted for one in others}
        group.coming = [one for one in group.coming if one.id in group.gone]
        return granted

    def let_go(self, attempt: int, reason: str) -> bool:
        """Whether a member waited for its group's lease, and does not any more."""
        group = self._groups.get(self._group_of.get(attempt, 0))
        if group is None or not any(one.id == attempt for one in group.coming):
            return False
        group.gone[attempt] = interrupted(reason)
        self._governor.drop(attempt, reason)
        return True

    def settled(self, verdict: Verdict) -> bool:
        """Whether it was a member's, whose lease is kept."""
        group = self._groups.get(self._group_of.pop(verdict.attempt, 0))
        if group is None:
            return False
        group.coming = [one for one in group.coming if one.id != verdict.attempt]
        self._governor.part(verdict)
        group.parked.append(verdict.attempt)
        return True

    def over(self, group: int) -> None:
        """What the group has kept goes back."""
        known = self._groups.pop(group, None)
        for attempt in known.parked if known is not None else ():
            self._governor.give(attempt)


class _Group:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.coming: list[Attempt] = []  # bound: as what follows, its members
        self.granted: dict[int, Lease | Failure] = {}
        self.gone: dict[int, Failure] = {}
        self.parked: list[int] = []
