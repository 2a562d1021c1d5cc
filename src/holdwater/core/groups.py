"""Groups: attempts of one instance that are scored together, and what is decided about them.

Pure. The planner keeps a `Group` for each that is open; the worker that hosts its members is in
`rollout/group.py`, what clients ask for in `serving.py`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .records import Failure, Record, Where

STRAGGLER = "straggler"  # the kind of a failure
CLIENT_GONE = "client"  # the same: of a rollout whose client did not come back


class GroupTerms(Record, frozen=True):
    """How a group is settled."""

    replace: int = 0  # members that fail for good are replaced, so many in all
    least: int = 1  # with fewer members that can be scored the group is not scored together
    quorum: int | None = None  # when so many members have acted and been graded ...
    patience: float = 0.0  # ... the others get so many seconds more, and are cut then


class Standing(StrEnum):
    """Where a member is."""

    WAITING = "waiting"  # for a start, or for another try
    RUNNING = "running"
    ARRIVED = "arrived"  # graded, alive, waiting for the others
    SCORED = "scored"  # its worker was told to: its verdict follows
    CLOSED = "closed"


THERE = (Standing.ARRIVED, Standing.SCORED)


class Group(msgspec.Struct):
    """An open group. It keeps its slots from its start until its last member is closed."""

    id: int  # of its order
    instance: int
    size: int
    terms: GroupTerms
    members: dict[int, Standing] = {}  # by sample; bound: size and what is replaced
    replaced: int = 0
    coming: int = 0  # replacements that have been asked for and not opened
    queued: bool = False
    started: bool = False
    scored: bool = False  # together, and some of those are closed: nobody can be compared with them any more
    cut_at: float | None = None
    was_cut: bool = False

    def enlist(self, sample: int) -> None:
        """A member was opened, at first or in the place of another."""
        self.members[sample] = Standing.WAITING
        self.coming = max(0, self.coming - 1)

    def dismiss(self, sample: int) -> bool:
        """A member is not wanted before the group has begun; whether others are left."""
        del self.members[sample]
        self.size -= 1
        return self.size > 0

    def wait(self, sample: int) -> None:
        """A member is to be tried again. With one that others had waited for, their quorum is gone."""
        if self.members[sample] in THERE:
            self.cut_at, self.was_cut = None, False
        self.members[sample] = Standing.WAITING

    def gives_up(self, sample: int) -> bool:
        """Whether a member is a straggler that is not tried again."""
        return self.was_cut and self.members[sample] not in THERE

    def close(self, sample: int, *, together: bool) -> None:
        """A member is over; `together`: by the scoring of its group."""
        self.members[sample] = Standing.CLOSED
        self.scored = self.scored or together

    def rally(self) -> bool:
        """Those that are there are scored; whether together."""
        together = self.arrived >= self.terms.least and not self.scored
        for sample, standing in self.members.items():
            if standing is Standing.ARRIVED:
                self.members[sample] = Standing.SCORED
        return together

    @property
    def places(self) -> int:
        """Slots that it needs."""
        return sum(1 for standing in self.members.values() if standing is not Standing.CLOSED) + self.coming

    @property
    def absent(self) -> int:
        """Slots that are kept for it, and empty."""
        return self._count(Standing.WAITING) + self.coming

    @property
    def reaches_quorum(self) -> bool:
        """Whether the time of those that are still at it begins now."""
        quorum = self.terms.quorum
        return quorum is not None and self.cut_at is None and quorum <= self.arrived < self.places

    @property
    def complete(self) -> bool:
        """Whether all that it will be has been opened."""
        return len(self.members) >= self.size

    @property
    def over(self) -> bool:
        return self.started and not self.coming and self._all(Standing.CLOSED)

    @property
    def due(self) -> bool:
        """Whether nobody is left to wait for: neither who acts nor who is still being scored."""
        ready = self.started and not self.coming and self.arrived > 0
        return ready and self._all(Standing.ARRIVED, Standing.CLOSED)

    @property
    def arrived(self) -> int:
        return self._count(Standing.ARRIVED)

    def take_replacement(self) -> bool:
        """Whether a member that failed for good is to be replaced."""
        if self.replaced >= self.terms.replace or self.scored or self._count(Standing.SCORED):
            return False
        self.replaced += 1
        self.coming += 1
        return True

    def _count(self, standing: Standing) -> int:
        return sum(1 for one in self.members.values() if one is standing)

    def _all(self, *standings: Standing) -> bool:
        return all(standing in standings for standing in self.members.values())


def straggled(terms: GroupTerms) -> Failure:
    """How a member is cut: it is graded on what it left."""
    return Failure(
        where=Where.LIMIT,
        kind=STRAGGLER,
        message=f"cut: {terms.quorum} members of its group had been done for {terms.patience:g} s",
    )


def cut(terms: GroupTerms) -> Failure:
    """How a member is cut that waits for another try: there is nothing to grade."""
    return cancelled(STRAGGLER, straggled(terms).message)


def cancelled(kind: str, message: str) -> Failure:
    """How a rollout ends that nobody wants any more."""
    return Failure(where=Where.CANCELLED, kind=kind, message=message, again=False)
