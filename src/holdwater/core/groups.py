"""Groups: attempts of one instance that are scored together, and the decisions about them.

Pure. The planner keeps a `Group` for each open one. `rollout/group.py` is the worker's side of a group,
`serving_protocol.py` has the client's request.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .records import AttemptFailure, FailureOrigin, Record

STRAGGLER = "straggler"  # a failure kind: cut because most of its group was done
CLIENT_GONE = "client"  # a failure kind: the client of the rollout did not reconnect


class GroupTerms(Record, frozen=True):
    """The rules for completing a group."""

    replace: int = 0  # how many members that fail for good are replaced, in total
    least: int = 1  # the group is not scored together with fewer members than this
    quorum: int | None = None  # when so many members have been graded ...
    patience: float = 0.0  # ... the others have this many seconds before they are cut


class MemberState(StrEnum):
    """The state of a member."""

    WAITING = "waiting"  # for its start, or for a retry
    RUNNING = "running"
    ARRIVED = "arrived"  # graded, still open, waiting for the other members
    SCORED = "scored"  # its worker has received the command to score it: its verdict follows
    CLOSED = "closed"


ARRIVED_STATES = (MemberState.ARRIVED, MemberState.SCORED)


class Group(msgspec.Struct):
    """An open group. It keeps its slots from its start until its last member is closed."""

    id: int  # id of its order
    instance: int
    size: int
    terms: GroupTerms
    members: dict[int, MemberState] = {}  # by sample; bound: size plus replacements
    replaced: int = 0
    pending_replacements: int = 0  # replacements that are requested and not opened yet
    queued: bool = False
    started: bool = False
    # Scored together, and some members are closed: no later member can be compared with them.
    scored: bool = False
    cut_at: float | None = None
    was_cut: bool = False

    def add_member(self, sample: int) -> None:
        """Add a newly opened member: an original one or a replacement."""
        self.members[sample] = MemberState.WAITING
        self.pending_replacements = max(0, self.pending_replacements - 1)

    def remove_member(self, sample: int) -> bool:
        """Remove a withdrawn member before the group has started; return whether members are left."""
        del self.members[sample]
        self.size -= 1
        return self.size > 0

    def mark_waiting(self, sample: int) -> None:
        """Mark a member for another try. If the member had arrived, the quorum no longer counts."""
        if self.members[sample] in ARRIVED_STATES:
            self.cut_at, self.was_cut = None, False
        self.members[sample] = MemberState.WAITING

    def gives_up(self, sample: int) -> bool:
        """Whether a member is a straggler that is not tried again."""
        return self.was_cut and self.members[sample] not in ARRIVED_STATES

    def close(self, sample: int, *, together: bool) -> None:
        """Close a member; `together`: its verdict comes from scoring the group."""
        self.members[sample] = MemberState.CLOSED
        self.scored = self.scored or together

    def start_scoring(self) -> bool:
        """Mark the arrived members as being scored; return whether they are scored together."""
        together = self.arrived >= self.terms.least and not self.scored
        for sample, standing in self.members.items():
            if standing is MemberState.ARRIVED:
                self.members[sample] = MemberState.SCORED
        return together

    @property
    def needed_slots(self) -> int:
        """Slots for the open members and the pending replacements."""
        return (
            sum(1 for standing in self.members.values() if standing is not MemberState.CLOSED)
            + self.pending_replacements
        )

    @property
    def reserved_slots(self) -> int:
        """Empty slots that are reserved for members."""
        return self._count(MemberState.WAITING) + self.pending_replacements

    @property
    def reaches_quorum(self) -> bool:
        """Whether the quorum is reached now, so that the deadline of the remaining members starts."""
        quorum = self.terms.quorum
        return quorum is not None and self.cut_at is None and quorum <= self.arrived < self.needed_slots

    @property
    def complete(self) -> bool:
        """Whether all members have been opened."""
        return len(self.members) >= self.size

    @property
    def over(self) -> bool:
        return self.started and not self.pending_replacements and self._all(MemberState.CLOSED)

    @property
    def due(self) -> bool:
        """Whether the arrived members can be scored: no member is running, waiting or being scored."""
        ready = self.started and not self.pending_replacements and self.arrived > 0
        return ready and self._all(MemberState.ARRIVED, MemberState.CLOSED)

    @property
    def arrived(self) -> int:
        return self._count(MemberState.ARRIVED)

    def take_replacement(self) -> bool:
        """Claim a replacement for a member that failed for good; return whether one is available."""
        if self.replaced >= self.terms.replace or self.scored or self._count(MemberState.SCORED):
            return False
        self.replaced += 1
        self.pending_replacements += 1
        return True

    def _count(self, standing: MemberState) -> int:
        return sum(1 for one in self.members.values() if one is standing)

    def _all(self, *standings: MemberState) -> bool:
        return all(standing in standings for standing in self.members.values())


def make_straggler_failure(terms: GroupTerms) -> AttemptFailure:
    """Return the failure of a running member that is cut: its work so far is graded."""
    return AttemptFailure(
        where=FailureOrigin.LIMIT,
        kind=STRAGGLER,
        message=f"cut: {terms.quorum} members of its group finished {terms.patience:g} s before",
    )


def make_cut_failure(terms: GroupTerms) -> AttemptFailure:
    """Return the failure of a member that is cut while it waits for a retry: it has no work to grade."""
    return make_cancel_failure(STRAGGLER, make_straggler_failure(terms).message)


def make_cancel_failure(kind: str, message: str) -> AttemptFailure:
    """Return the failure of a cancelled rollout."""
    return AttemptFailure(where=FailureOrigin.CANCELLED, kind=kind, message=message, again=False)
