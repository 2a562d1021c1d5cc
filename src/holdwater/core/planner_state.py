"""The planner's state as plain records: open samples, groups and queues.

The state can be encoded and decoded (`RunPlanner.rebuild`). The decisions are in `plan.py`.
"""

from __future__ import annotations

import msgspec

from .groups import Group, make_cut_failure
from .policy import PlannerPolicy, TryCounts, VerdictSummary, outcome_kind
from .records import Attempt, AttemptFailure, Outcome


class Sample(msgspec.Struct):
    """An open sample: pulled or ordered, and not closed."""

    instance: int
    sample: int
    number: int
    spent: TryCounts
    losses: int = 0
    crashes: int = 0  # lost workers that it crashed while it ran alone in them
    preemptions: int = 0
    running: Attempt | None = None
    best: VerdictSummary | None = None
    regrades: int | None = None
    group: int | None = None
    withdrawn: AttemptFailure | None = None  # why the sample was withdrawn


QueueKey = tuple[int, int]  # (instance, sample), or (group, one of the following markers)
WHOLE_GROUP = -1  # all members of the group are ready
STRAGGLER_CUT = -2  # the deadline of the group's stragglers has passed


class PlannerState(msgspec.Struct):
    """The complete state of the planner."""

    policy: PlannerPolicy
    next_attempt: int
    open: dict[QueueKey, Sample] = {}  # bound: `window` samples, or the limit on open orders
    groups: dict[int, Group] = {}  # bound: as `open`
    ready: list[QueueKey] = []
    members: list[QueueKey] = []  # ready members of groups that have their slots
    alone: list[QueueKey] = []  # ready samples that need a worker of their own
    delayed: list[tuple[float, QueueKey]] = []  # a heap
    running: dict[int, QueueKey] = {}  # bound: `policy.concurrency`
    pulling: int = 0
    exhausted: bool = False
    draining: bool = False
    aborted: bool = False
    finished: bool = False
    wake_at: float | None = None

    def group_of(self, key: QueueKey) -> Group | None:
        group = self.open[key].group
        return None if group is None else self.groups[group]

    def is_suspect(self, group: Group) -> bool:
        """Whether a member lost so many workers that the group must run in a worker of its own."""
        samples = (self.open.get((group.instance, sample)) for sample in group.members)
        losses = max((sample.losses for sample in samples if sample is not None), default=0)
        return losses >= self.policy.losses_before_alone

    def policy_for(self, sample: Sample) -> PlannerPolicy:
        """Return the policy for a sample.

        Members of a group have a single round, because they are compared with each other as they are.
        """
        policy = self.policy
        return policy if sample.group is None else msgspec.structs.replace(policy, attempts=1)

    def find_withdrawal(self, sample: Sample) -> AttemptFailure | None:
        """Return why the sample is not tried again: withdrawn, or cut as a straggler; None: it may be."""
        group = self.groups.get(sample.group) if sample.group is not None else None
        if sample.withdrawn is None and group is not None and group.gives_up(sample.sample):
            return make_cut_failure(group.terms)
        return sample.withdrawn

    @property
    def unfinished_groups(self) -> bool:
        """Whether a started group can still be finished before the run ends."""
        return not self.aborted and any(group.started for group in self.groups.values())

    def count_slots(self, key: QueueKey) -> int:
        """Return the slots that a queue entry needs, at most the run's concurrency."""
        if key[1] != WHOLE_GROUP:
            return 1
        return min(self.groups[key[0]].needed_slots, self.policy.concurrency)

    @property
    def free_slots(self) -> int:
        """Slots neither in use nor reserved for a started group."""
        kept = sum(group.reserved_slots for group in self.groups.values() if group.started)
        return self.policy.concurrency - len(self.running) - kept

    @property
    def window(self) -> int:
        """The number of samples that may be open: just enough that a free slot never waits for the suite.

        Samples in back-off make room for others, up to four times the concurrency.
        """
        concurrency = self.policy.concurrency
        ahead = max(4, concurrency)
        return min(concurrency + ahead + len(self.delayed), 4 * concurrency + ahead)

    @property
    def running_alone(self) -> int:
        samples = (self.open[key] for key in self.running.values())
        return sum(1 for sample in samples if sample.running is not None and sample.running.alone)


def make_outcome(sample: Sample, best: VerdictSummary, *, spent: bool) -> Outcome:
    """Return the outcome of a sample with this best verdict."""
    kind = outcome_kind(best, spent=spent)
    scored = kind in ("passed", "failed")
    return Outcome(
        instance=sample.instance,
        sample=sample.sample,
        attempt=best.attempt,
        kind=kind,
        score=(best.score or 0.0) if scored else None,
        where=best.where,
    )
