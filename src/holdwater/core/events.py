"""What the planner is told and what it answers: events in, commands out. `plan.py` says what follows."""

from __future__ import annotations

from .groups import Group, GroupTerms
from .policy import Result
from .records import Attempt, Failure, Outcome, Record


class Event(Record, frozen=True, tag=True):
    """Something that happened, at a time on the scheduler's clock."""


class Membership(Record, frozen=True):
    """The group that a sample belongs to: of `size`, settled on these terms."""

    group: int
    size: int
    terms: GroupTerms = GroupTerms()
    scored: bool = False  # together, before this conductor: some of its members are closed

    def opened(self, instance: int) -> Group:
        """The group itself, when its first member is opened."""
        return Group(id=self.group, instance=instance, size=self.size, terms=self.terms, scored=self.scored)


class Opened(Event, frozen=True):
    """A sample was written to the ledger and can be tried. The rest is what an earlier conductor left.

    `last` is a verdict that nothing had followed on; the counts are those before it.
    """

    instance: int
    sample: int
    number: int = 0
    round: int = 1
    retries: int = 0
    scale: int = 1
    losses: int = 0
    crashes: int = 0
    first: int = 1  # the round from which `--attempts` counts
    best: Result | None = None
    last: Result | None = None
    regrades: int | None = None
    group: Membership | None = None


class Exhausted(Event, frozen=True):
    """The suite has no more instances."""


class Settled(Event, frozen=True):
    """A verdict was committed."""

    result: Result


class Withdrawn(Event, frozen=True):
    """Nobody wants the sample any more: it ends with this failure."""

    instance: int
    sample: int
    failure: Failure


class Joined(Event, frozen=True):
    """The attempt has been graded and waits for the rest of its group."""

    attempt: int


class Preempt(Event, frozen=True):
    """The governor wants the attempt's resources back."""

    attempt: int


class Woke(Event, frozen=True):
    """The time of a `Wake` has come."""


class Drain(Event, frozen=True):
    """Start nothing more."""


class Abort(Event, frozen=True):
    """Start nothing more and interrupt what runs."""


AnyEvent = Opened | Exhausted | Settled | Withdrawn | Joined | Preempt | Woke | Drain | Abort


class Command(Record, frozen=True, tag=True):
    """Something that the scheduler has to do."""


class Pull(Command, frozen=True):
    """Get `count` more samples."""

    count: int


class Start(Command, frozen=True):
    attempt: Attempt


class Interrupt(Command, frozen=True):
    """End the attempt with the verdict `interrupted`."""

    attempt: int


class End(Command, frozen=True):
    """End a running attempt with this failure."""

    attempt: int
    failure: Failure


class Refuse(Command, frozen=True):
    """Write the attempt and settle it with this failure; it is not started."""

    attempt: Attempt
    failure: Failure


class Rally(Command, frozen=True):
    """Nobody is left to wait for: the group's members that are there are scored, `together` or each alone."""

    group: int
    together: bool


class Disband(Command, frozen=True):
    """The last member of the group is closed."""

    group: int


class Replace(Command, frozen=True):
    """Open another sample for the group, in the place of one that failed for good."""

    group: int
    instance: int


class Close(Command, frozen=True):
    """The sample is done."""

    outcome: Outcome


class Wake(Command, frozen=True):
    """Send `Woke` at this time."""

    at: float


class Finish(Command, frozen=True):
    """There is nothing left to do, or nothing left that may be done."""


AnyCommand = Pull | Start | Interrupt | End | Refuse | Rally | Replace | Disband | Close | Wake | Finish
