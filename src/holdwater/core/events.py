"""The events that the planner receives and the commands that it returns. `plan.py` connects the two."""

from __future__ import annotations

from .groups import Group, GroupTerms
from .policy import PlannerPolicy, VerdictSummary
from .records import Attempt, AttemptFailure, Outcome, Record


class PlannerEvent(Record, frozen=True, tag=True):
    """An event, at a time of the scheduler's clock."""


class GroupMembership(Record, frozen=True):
    """The group of a sample: its size and its terms."""

    group: int
    size: int
    terms: GroupTerms = GroupTerms()
    scored: bool = False  # an earlier conductor scored the group together, and some members are closed

    def open_group(self, instance: int) -> Group:
        """Create the group, when its first member is opened."""
        return Group(id=self.group, instance=instance, size=self.size, terms=self.terms, scored=self.scored)


class SampleOpened(PlannerEvent, frozen=True):
    """A sample was written to the ledger and can be tried.

    The fields with defaults restore the state that an earlier conductor left. `last` is a verdict that has
    not been acted on yet; the counts are from before that verdict.
    """

    instance: int
    sample: int
    number: int = 0
    round: int = 1
    retries: int = 0
    scale: int = 1
    losses: int = 0
    crashes: int = 0
    outages: int = 0
    first: int = 1  # the round from which `--attempts` counts
    best: VerdictSummary | None = None
    last: VerdictSummary | None = None
    regrades: int | None = None
    group: GroupMembership | None = None


class SuiteExhausted(PlannerEvent, frozen=True):
    """The suite has no more instances."""


class VerdictCommitted(PlannerEvent, frozen=True):
    """A verdict was committed to the ledger."""

    result: VerdictSummary


class SampleWithdrawn(PlannerEvent, frozen=True):
    """The sample was withdrawn: it ends with this failure."""

    instance: int
    sample: int
    failure: AttemptFailure


class SampleRetried(PlannerEvent, frozen=True):
    """An open sample is to be tried again: at once, or in another round if an attempt is running.

    The running attempt ends with this failure.
    """

    instance: int
    sample: int
    failure: AttemptFailure


class SamplesExpected(PlannerEvent, frozen=True):
    """So many closed samples are about to be opened again: the run does not end before.

    A negative count takes an announcement back.
    """

    count: int


class MemberArrived(PlannerEvent, frozen=True):
    """The attempt has been graded and waits for the rest of its group."""

    attempt: int


class PreemptRequested(PlannerEvent, frozen=True):
    """The governor reclaims the attempt's resources."""

    attempt: int


class TimerFired(PlannerEvent, frozen=True):
    """The time of a `SetTimer` has come."""


class PauseRequested(PlannerEvent, frozen=True):
    """Start no more attempts until `PauseEnded`."""


class PauseEnded(PlannerEvent, frozen=True):
    """Start attempts again."""


class PolicyChanged(PlannerEvent, frozen=True):
    """Decide by this policy from now on."""

    policy: PlannerPolicy


class DrainRequested(PlannerEvent, frozen=True):
    """Start no more attempts."""


class AbortRequested(PlannerEvent, frozen=True):
    """Start no more attempts and interrupt the running ones."""


AnyEvent = (
    SampleOpened
    | SuiteExhausted
    | VerdictCommitted
    | SampleWithdrawn
    | SampleRetried
    | SamplesExpected
    | MemberArrived
    | PreemptRequested
    | PauseRequested
    | PauseEnded
    | PolicyChanged
    | TimerFired
    | DrainRequested
    | AbortRequested
)


class PlannerCommand(Record, frozen=True, tag=True):
    """A command that the scheduler has to execute."""


class PullSamples(PlannerCommand, frozen=True):
    """Pull `count` more samples from the suite."""

    count: int


class StartAttempt(PlannerCommand, frozen=True):
    attempt: Attempt


class InterruptAttempt(PlannerCommand, frozen=True):
    """End the attempt with the verdict `interrupted`."""

    attempt: int


class EndAttempt(PlannerCommand, frozen=True):
    """End a running attempt with this failure."""

    attempt: int
    failure: AttemptFailure


class RefuseAttempt(PlannerCommand, frozen=True):
    """Write the attempt to the ledger and settle it with this failure, without starting it."""

    attempt: Attempt
    failure: AttemptFailure


class ScoreGroup(PlannerCommand, frozen=True):
    """Score the arrived members of the group, `together` or each alone: no other member is awaited."""

    group: int
    together: bool


class GroupClosed(PlannerCommand, frozen=True):
    """The last member of the group is closed."""

    group: int


class ReplaceMember(PlannerCommand, frozen=True):
    """Open another sample for the group, in place of one that failed for good."""

    group: int
    instance: int


class CloseSample(PlannerCommand, frozen=True):
    """Record the outcome of the sample."""

    outcome: Outcome


class SetTimer(PlannerCommand, frozen=True):
    """Send `TimerFired` at this time."""

    at: float


class FinishRun(PlannerCommand, frozen=True):
    """End the run: no work is left, or none that may be started."""


AnyCommand = (
    PullSamples
    | StartAttempt
    | InterruptAttempt
    | EndAttempt
    | RefuseAttempt
    | ScoreGroup
    | ReplaceMember
    | GroupClosed
    | CloseSample
    | SetTimer
    | FinishRun
)
