"""Groups: attempts of one instance that are scored together, and what is decided about them.

Pure. The planner keeps a `Group` for each that is open; the worker that hosts its members is in
`rollout/group.py`, what clients ask for in `serving.py`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .records import Failure, Record, Where

STRAGGLER = "straggler"  # the kind of a failure


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
    CLOSED = "closed"


class Group(msgspec.Struct):
    """An open group. It keeps its slots from its start until its last member is closed."""

    id: int  # of its order
    instance: int
    size: int
    terms: GroupTerms
    members: dict[int, Standing] = {}  # by sample; bound: size and what is replaced
    replaced: int = 0
    coming: int = 0  # replacements that have been asked for and not opened
    started: bool = False
    scoring: bool = False
    cut_at: float | None = None
    losses: int = 0  # workers that were lost under it

    @property
    def complete(self) -> bool:
        """Whether all that it will be has been opened."""
        return len(self.members) >= self.size

    @property
    def over(self) -> bool:
        return self.started and not self.coming and self._all(Standing.CLOSED)

    @property
    def due(self) -> bool:
        """Whether nobody is left to wait for, and it is not being scored yet."""
        ready = self.started and not self.coming and not self.scoring and self.arrived > 0
        return ready and self._all(Standing.ARRIVED, Standing.CLOSED)

    @property
    def arrived(self) -> int:
        return sum(1 for standing in self.members.values() if standing is Standing.ARRIVED)

    @property
    def scored_together(self) -> bool:
        return self.arrived >= self.terms.least

    def take_replacement(self) -> bool:
        """Whether a member that failed for good is to be replaced."""
        if self.replaced >= self.terms.replace or self.scoring:
            return False
        self.replaced += 1
        self.coming += 1
        return True

    def _all(self, *standings: Standing) -> bool:
        return all(standing in standings for standing in self.members.values())


def straggled(terms: GroupTerms) -> Failure:
    """How a member is cut: it is graded on what it left."""
    return Failure(
        where=Where.LIMIT,
        kind=STRAGGLER,
        message=f"cut: {terms.quorum} members of its group had been done for {terms.patience:g} s",
    )


def cancelled(kind: str, message: str) -> Failure:
    """How a rollout ends that nobody wants any more."""
    return Failure(where=Where.CANCELLED, kind=kind, message=message, again=False)
