"""Everything that the planner knows, as plain records: the open samples, the groups, what waits for what.

It can be written down and read back (`Plan.replayed`). What is decided with it is in `plan.py`.
"""

from __future__ import annotations

import msgspec

from .groups import Group, cut
from .policy import Policy, Result, Spent, outcome_kind
from .records import Attempt, Failure, Outcome


class Sample(msgspec.Struct):
    """An open sample: pulled, not closed."""

    instance: int
    sample: int
    number: int
    spent: Spent
    losses: int = 0
    crashes: int = 0  # of the losses: workers that it took down while alone in them
    preemptions: int = 0
    running: Attempt | None = None
    best: Result | None = None
    regrades: int | None = None
    group: int | None = None
    withdrawn: Failure | None = None  # nobody wants it any more


Key = tuple[int, int]  # instance, sample; or a group, and one of these:
WHOLE = -1  # all of its members are ready
CUT = -2  # its stragglers' time is over


class State(msgspec.Struct):
    """Everything that the planner knows."""

    policy: Policy
    next_attempt: int
    open: dict[Key, Sample] = {}  # bound: `_window` samples, or what may be ordered at once
    groups: dict[int, Group] = {}  # bound: as `open`
    ready: list[Key] = []
    members: list[Key] = []  # ready, and of a group that has its slots
    alone: list[Key] = []  # ready, but in a worker of their own
    delayed: list[tuple[float, Key]] = []  # a heap
    running: dict[int, Key] = {}  # bound: `policy.concurrency`
    pulling: int = 0
    exhausted: bool = False
    draining: bool = False
    aborted: bool = False
    finished: bool = False
    wake_at: float | None = None

    def group_of(self, key: Key) -> Group | None:
        group = self.open[key].group
        return None if group is None else self.groups[group]

    def is_suspect(self, group: Group) -> bool:
        """Whether a member of it has lost so many workers that it is to have one to itself."""
        samples = (self.open.get((group.instance, sample)) for sample in group.members)
        losses = max((sample.losses for sample in samples if sample is not None), default=0)
        return losses >= self.policy.losses_before_alone

    def policy_for(self, sample: Sample) -> Policy:
        """Members of a group have one round: they are compared with each other as they are."""
        policy = self.policy
        return policy if sample.group is None else msgspec.structs.replace(policy, attempts=1)

    def unwanted(self, sample: Sample) -> Failure | None:
        """Why it is not tried again, if that is so: nobody wants it, or it was cut."""
        group = self.groups.get(sample.group) if sample.group is not None else None
        if sample.withdrawn is None and group is not None and group.gives_up(sample.sample):
            return cut(group.terms)
        return sample.withdrawn

    @property
    def unfinished_groups(self) -> bool:
        """Whether a group that has begun can be finished before the run ends."""
        return not self.aborted and any(group.started for group in self.groups.values())

    def places(self, key: Key) -> int:
        """Slots that it needs: never more than there are."""
        if key[1] != WHOLE:
            return 1
        return min(self.groups[key[0]].places, self.policy.concurrency)

    @property
    def free(self) -> int:
        """Slots that nobody has, and that are kept for nobody."""
        kept = sum(group.absent for group in self.groups.values() if group.started)
        return self.policy.concurrency - len(self.running) - kept

    @property
    def window(self) -> int:
        """How many samples may be open: enough that a free slot never waits for the suite, and no more.

        Samples in back-off make room for others, up to four times the concurrency.
        """
        concurrency = self.policy.concurrency
        ahead = max(4, concurrency)
        return min(concurrency + ahead + len(self.delayed), 4 * concurrency + ahead)

    @property
    def running_alone(self) -> int:
        samples = (self.open[key] for key in self.running.values())
        return sum(1 for sample in samples if sample.running is not None and sample.running.alone)


def outcome_of(sample: Sample, best: Result, *, spent: bool) -> Outcome:
    """What became of a sample whose best verdict this is."""
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
