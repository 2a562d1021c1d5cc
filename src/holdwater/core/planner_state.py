"""The planner's state as plain records (open samples, groups), and the queues that work on it.

The queues decide which entry starts next; all other decisions are in `plan.py`.
"""

from __future__ import annotations

import heapq
from collections import deque

import msgspec

from .events import AnyEvent, PauseEnded, PauseRequested, PolicyChanged, SamplesExpected
from .groups import Group, MemberState, make_cut_failure
from .policy import PlannerPolicy, TryCounts, VerdictSummary, outcome_kind, rank
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
    outages: int = 0  # sandboxes that it lost with their machine
    running: Attempt | None = None
    best: VerdictSummary | None = None
    regrades: int | None = None
    group: int | None = None
    withdrawn: AttemptFailure | None = None  # why the sample was withdrawn
    anew: bool = False  # another round follows the running attempt, however that ends

    def begin_round(self) -> None:
        """Begin another round: its tries count anew, and nothing of earlier rounds is used again."""
        following = self.spent.round + 1
        self.spent = TryCounts(following, 0, self.spent.scale, following)
        self.anew, self.regrades = False, None

    def compare_best(self, result: VerdictSummary) -> VerdictSummary:
        """Keep the better one of the best verdict so far and this one; return it."""
        if self.best is None or rank(result) >= rank(self.best):
            self.best = result
        return self.best


QueueKey = tuple[int, int]  # (instance, sample), or (group, one of the following markers)
WHOLE_GROUP = -1  # all members of the group are ready
STRAGGLER_CUT = -2  # the deadline of the group's stragglers has passed


class PlannerState(msgspec.Struct):
    """The state of the planner, without its queues."""

    policy: PlannerPolicy
    next_attempt: int
    open: dict[QueueKey, Sample] = {}  # bound: `window` samples, or the limit on open orders
    groups: dict[int, Group] = {}  # bound: as `open`
    delayed: list[tuple[float, QueueKey]] = []  # a heap
    running: dict[int, QueueKey] = {}  # bound: `policy.concurrency`
    pulling: int = 0
    expected: int = 0  # closed samples that are about to be opened again
    paused: bool = False
    exhausted: bool = False
    draining: bool = False
    aborted: bool = False
    finished: bool = False
    wake_at: float | None = None

    def change(self, event: AnyEvent) -> None:
        """Apply an event that concerns the whole run."""
        match event:
            case PauseRequested():
                self.paused = True
            case PauseEnded():
                # The clock stood still: the timer is set anew.
                self.paused, self.wake_at = False, None
            case PolicyChanged(policy=policy):
                self.policy = policy
            case SamplesExpected(count=count):
                self.expected += count

    def make_attempt(self, key: QueueKey, alone: bool) -> Attempt:
        """Make the next attempt of an open sample, which takes a slot."""
        sample = self.open[key]
        sample.number += 1
        attempt = Attempt(
            id=self.next_attempt,
            instance=sample.instance,
            sample=sample.sample,
            number=sample.number,
            round=sample.spent.round,
            scale=sample.spent.scale,
            alone=alone,
            regrades=sample.regrades,
            group=sample.group,
            crashes=sample.crashes,
        )
        if sample.group is not None:
            self.groups[sample.group].members[sample.sample] = MemberState.RUNNING
        self.next_attempt += 1
        self.running[attempt.id] = key
        sample.running = attempt
        return attempt

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
    def over(self) -> bool:
        """Whether nothing is left that may be started."""
        if self.draining:
            return not self.unfinished_groups
        return self.exhausted and not self.open and not self.expected

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


class SampleQueues:
    """The queues of one planner, over its state. Bound of each: as `PlannerState.open`."""

    def __init__(self, state: PlannerState) -> None:
        self._state = state
        self._alone: deque[QueueKey] = deque()  # samples that need a worker of their own
        self.ready: deque[QueueKey] = deque()
        self.members: deque[QueueKey] = deque()  # of groups that have their slots

    def count_waiting(self) -> dict[str, int]:
        """Count the queued samples, by the reason for their wait."""
        counts = {
            "slot": sum(map(self._state.count_slots, self.ready)),
            "a worker of its own": sum(map(self._state.count_slots, self._alone)),
            "back-off": sum(1 for _, key in self._state.delayed if key[1] != STRAGGLER_CUT),
        }
        return {why: count for why, count in counts.items() if count}

    def add(self, key: QueueKey, *, first: bool = False) -> None:
        """Queue a sample; a member of a group that has not started waits for the whole group."""
        sample = self._state.open[key]
        if (group := self._state.group_of(key)) is not None:
            group.mark_waiting(sample.sample)
            if group.started:
                self.members.append(key)
            else:
                self.add_group(group)
            return
        queue = self._alone if sample.losses >= self._state.policy.losses_before_alone else self.ready
        if first:
            queue.appendleft(key)
        else:
            queue.append(key)

    def add_group(self, group: Group) -> None:
        """Queue a complete group until there are slots for all of its members."""
        if group.complete and not group.started and not group.queued and group.needed_slots:
            group.queued = True
            (self._alone if self._state.is_suspect(group) else self.ready).append((group.id, WHOLE_GROUP))

    def delay(self, key: QueueKey, until: float) -> None:
        heapq.heappush(self._state.delayed, (until, key))

    def pop_due(self, at: float) -> tuple[float, QueueKey] | None:
        """Return the first delayed entry whose time has come, with that time."""
        delayed = self._state.delayed
        return heapq.heappop(delayed) if delayed and delayed[0][0] <= at else None

    def pop_ready(self) -> tuple[QueueKey, bool] | None:
        """Return the entry that can start now, and whether it needs a worker of its own.

        No sample overtakes a group that waits for enough slots.
        """
        free = self._state.free_slots
        suspect = self._alone and self._state.running_alone < self._state.policy.alone_at_once
        if suspect and self._state.count_slots(self._alone[0]) <= free:
            return self._alone.popleft(), True
        if self.ready and self._state.count_slots(self.ready[0]) <= free:
            return self.ready.popleft(), False
        return None

    def hurry(self, key: QueueKey) -> None:
        """Move a sample in back-off to the front of its queue."""
        if any(delayed == key for _, delayed in self._state.delayed):
            self.remove(key)
            self.add(key, first=True)

    def remove(self, key: QueueKey) -> None:
        for queue in (self.ready, self._alone, self.members):
            if key in queue:
                queue.remove(key)
        self._state.delayed = [entry for entry in self._state.delayed if entry[1] != key]
        heapq.heapify(self._state.delayed)
