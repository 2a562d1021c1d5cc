"""The planner with ordered samples: groups start whole, are scored once nobody is missing, and always end.

A state machine does what the planner commands, at moments that hypothesis chooses; whatever was ordered has
one outcome in the end. Samples that are pulled from a suite are in `test_core_plan.py`.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.replayed_planner import ReplayedPlanner

from holdwater.core.events import (
    AnyCommand,
    AnyEvent,
    CloseSample,
    DrainRequested,
    EndAttempt,
    FinishRun,
    GroupClosed,
    GroupMembership,
    InterruptAttempt,
    MemberArrived,
    PreemptRequested,
    RefuseAttempt,
    ReplaceMember,
    SampleOpened,
    SampleWithdrawn,
    ScoreGroup,
    SetTimer,
    StartAttempt,
    TimerFired,
    VerdictCommitted,
)
from holdwater.core.failures import make_loss_failure
from holdwater.core.groups import STRAGGLER, GroupTerms, make_cancel_failure
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import PlannerPolicy, VerdictSummary
from holdwater.core.records import Attempt, FailureOrigin, Outcome, Verdict

Key = tuple[int, int]
SLOTS = 6
UNWANTED = make_cancel_failure("asked", "not wanted")

terms = st.builds(
    GroupTerms,
    replace=st.integers(0, 2),
    least=st.integers(1, 3),
    quorum=st.sampled_from([None, 1, 2]),
    patience=st.sampled_from([0.0, 5.0]),
)
failures = st.sampled_from(
    [FailureOrigin.MODEL, FailureOrigin.SANDBOX, FailureOrigin.GRADE, FailureOrigin.RESOURCE]
)


def passed(attempt: int) -> VerdictSummary:
    return VerdictSummary(attempt=attempt, passed=True, score=1.0)


class Serving(RuleBasedStateMachine):
    """A server with six slots, and its clients."""

    @initialize(retries=st.integers(0, 2))
    def begin(self, retries: int) -> None:
        policy = PlannerPolicy(concurrency=SLOTS, retries=retries, backoff=1.0, ordered=True)
        self.plan = ReplayedPlanner(policy)
        self.now = 0.0
        self.orders: dict[int, tuple[int, GroupTerms | None]] = {}  # order -> members so far, terms
        self.ordered: dict[Key, int] = {}
        self.running: dict[int, Attempt] = {}
        self.refused: set[int] = set()
        self.arrived: set[int] = set()
        self.rallied: dict[int, bool] = {}  # attempts that are being scored -> together
        self.scored: set[int] = set()  # groups of which some were scored together and are over
        self.ended: dict[int, FailureOrigin] = {}
        self.withdrawn: set[Key] = set()
        self.disbanded: set[int] = set()
        self.outcomes: dict[Key, Outcome] = {}
        self.wakes: list[float] = []
        self.finished = False
        self.take(TimerFired())

    def take(self, event: AnyEvent) -> list[AnyCommand]:
        twin = self.plan.build_twin()
        commands = self.plan.handle(event, self.now)
        assert twin.handle(event, self.now) == commands
        for command in commands:
            self.do(command)
        return commands

    def do(self, command: AnyCommand) -> None:
        match command:
            case StartAttempt(attempt=attempt):
                key = (attempt.instance, attempt.sample)
                assert key in self.ordered and key not in self.outcomes
                assert key not in [(a.instance, a.sample) for a in self.running.values()]
                self.running[attempt.id] = attempt
            case RefuseAttempt(attempt=attempt, failure=failure):
                assert failure.where is FailureOrigin.CANCELLED
                self.running[attempt.id] = attempt
                self.refused.add(attempt.id)
            case EndAttempt(attempt=attempt, failure=failure):
                assert attempt in self.running
                self.ended[attempt] = failure.where
            case InterruptAttempt(attempt=attempt):
                self.ended[attempt] = FailureOrigin.INTERRUPTED
            case ScoreGroup(group=group, together=together):
                self.rally(group, together)
            case ReplaceMember(group=group, instance=instance):
                self.open(group, instance, replacement=True)
            case GroupClosed(group=group):
                assert group not in self.disbanded
                self.disbanded.add(group)
            case CloseSample(outcome=outcome):
                key = (outcome.instance, outcome.sample)
                assert key not in self.outcomes
                self.outcomes[key] = outcome
            case SetTimer(at=at):
                self.wakes.append(at)
            case FinishRun():
                assert not self.running
                self.finished = True

    def rally(self, group: int, together: bool) -> None:
        """Nobody of the group is on its way, in or out: each is here, or over; nobody is scored apart."""
        here = {a.id: (a.instance, a.sample) for a in self.running.values() if a.group == group}
        assert here and here.keys() <= self.arrived and not here.keys() & self.rallied.keys()
        assert not (together and group in self.scored)
        missing = self.members(group) - set(here.values()) - set(self.outcomes)
        assert missing <= self.withdrawn
        self.rallied |= dict.fromkeys(here, together)

    def members(self, order: int) -> set[Key]:
        return {key for key, of in self.ordered.items() if of == order}

    def open(self, order: int, instance: int, *, replacement: bool = False) -> None:
        count, terms_ = self.orders[order]
        size = len(self.members(order)) + 1 if replacement else count
        samples = [len(self.members(order))] if replacement else list(range(count))
        group = None if terms_ is None else GroupMembership(group=order, size=size, terms=terms_)
        self.ordered.update({(instance, sample): order for sample in samples})
        for sample in samples:
            self.take(SampleOpened(instance=instance, sample=sample, group=group))

    def settle(self, result: VerdictSummary) -> None:
        attempt = self.running.pop(result.attempt)
        for known in (self.arrived, self.refused):
            known.discard(attempt.id)
        self.ended.pop(attempt.id, None)
        together = self.rallied.pop(attempt.id, False) and result.where is None
        if together and attempt.group is not None:
            self.scored.add(attempt.group)
            result = msgspec.structs.replace(result, group_scored=True)
        self.take(VerdictCommitted(result=result))

    def acting(self) -> list[Attempt]:
        known = self.arrived | self.refused
        return [attempt for attempt in self.running.values() if attempt.id not in known]

    # What can happen.

    @precondition(lambda self: len(self.orders) < 6 and not self.plan.draining)
    @rule(size=st.integers(1, SLOTS), terms_=st.one_of(st.none(), terms))
    def order(self, size: int, terms_: GroupTerms | None) -> None:
        order = len(self.orders) + 1
        self.orders[order] = size, terms_
        self.open(order, order)

    @precondition(lambda self: self.acting())
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.acting()))
        if attempt.group is None:
            self.settle(passed(attempt.id))
        else:
            self.arrived.add(attempt.id)
            self.take(MemberArrived(attempt=attempt.id))

    @precondition(lambda self: self.rallied)
    @rule(data=st.data(), where=st.one_of(st.none(), st.none(), failures))
    def score(self, data: st.DataObject, where: FailureOrigin | None) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.rallied)))
        result = passed(attempt)
        self.settle(result if where is None else msgspec.structs.replace(result, where=where, passed=None))

    @precondition(lambda self: self.acting())
    @rule(data=st.data(), where=failures)
    def fail(self, data: st.DataObject, where: FailureOrigin) -> None:
        attempt = data.draw(st.sampled_from(self.acting()))
        self.settle(VerdictSummary(attempt=attempt.id, where=where))

    @precondition(lambda self: self.ended or self.refused)
    @rule(data=st.data())
    def obey(self, data: st.DataObject) -> None:
        """What was ended or refused has its verdict; a straggler is graded, and arrives."""
        attempt = data.draw(st.sampled_from(sorted({*self.ended, *self.refused})))
        if self.ended.get(attempt) is FailureOrigin.LIMIT and attempt not in self.arrived:
            self.ended.pop(attempt)
            self.arrived.add(attempt)
            self.take(MemberArrived(attempt=attempt))
        elif attempt in self.refused or self.ended[attempt] is not FailureOrigin.LIMIT:
            self.settle(
                VerdictSummary(
                    attempt=attempt, where=self.ended.get(attempt, FailureOrigin.CANCELLED), again=False
                )
            )
        else:
            self.ended.pop(attempt)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_a_group_or_one(self, data: st.DataObject) -> None:
        """A worker dies: of a group, all that run."""
        first = data.draw(st.sampled_from(list(self.running.values())))
        lost = [a for a in self.running.values() if a.id == first.id or (a.group and a.group == first.group)]
        for attempt in lost:
            if attempt.id not in self.refused:
                failure = make_loss_failure(attempt, "killed", own=True)
                self.settle(VerdictSummary.of(Verdict(attempt=attempt.id, token=1, failure=failure)))

    @precondition(lambda self: set(self.ordered) - set(self.outcomes))
    @rule(data=st.data(), whole=st.booleans())
    def withdraw(self, data: st.DataObject, whole: bool) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.ordered) - set(self.outcomes))))
        keys = self.members(self.ordered[key]) if whole else {key}
        for instance, sample in sorted(keys):
            self.withdrawn.add((instance, sample))
            self.take(SampleWithdrawn(instance=instance, sample=sample, failure=UNWANTED))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.running)))
        commands = self.take(PreemptRequested(attempt=attempt))
        if attempt in self.arrived:
            assert commands == []

    @rule(seconds=st.sampled_from([0.5, 4.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wakes and min(self.wakes) <= until:
            self.now = max(self.now, min(self.wakes))
            self.wakes.remove(min(self.wakes))
            self.take(TimerFired())
        self.now = until

    # What always holds.

    @invariant()
    def never_more_at_once_than_there_are_slots(self) -> None:
        assert len(self.running) - len(self.refused) <= SLOTS

    @invariant()
    def members_of_a_group_begin_together(self) -> None:
        groups = {a.group for a in self.running.values() if a.group is not None}
        assert sum(len(self.members(group) - set(self.outcomes)) for group in groups) <= SLOTS + len(
            self.refused
        )

    @invariant()
    def its_twin_is_equal(self) -> None:
        assert self.plan.build_twin().encode() == self.plan.encode()

    def teardown(self) -> None:
        """From wherever it stands, everything that was ordered comes to its end within a bound."""
        if not hasattr(self, "plan"):
            return
        self.take(DrainRequested()) if not self.orders else None
        for _ in range(400):
            if set(self.outcomes) == set(self.ordered):
                break
            self.pass_time(100.0)
            for attempt in list(self.running.values()):
                self.finish(attempt)
        assert set(self.outcomes) == set(self.ordered)
        groups = {order for order, (_, terms_) in self.orders.items() if terms_ is not None}
        assert self.disbanded <= groups and not self.plan._state.groups
        for key, outcome in self.outcomes.items():
            if outcome.kind == "cancelled":
                assert key in self.withdrawn or self.orders[self.ordered[key]][1] is not None
        if not self.finished and not self.plan.draining:
            self.take(DrainRequested())
        assert self.finished

    def finish(self, attempt: Attempt) -> None:
        if attempt.id not in self.running:
            return
        where = self.ended.get(attempt.id)
        if attempt.id in self.refused or where in (FailureOrigin.CANCELLED, FailureOrigin.INTERRUPTED):
            self.settle(
                VerdictSummary(attempt=attempt.id, where=where or FailureOrigin.CANCELLED, again=False)
            )
        elif attempt.group is None or attempt.id in self.rallied:
            self.settle(passed(attempt.id))
        elif attempt.id not in self.arrived:
            self.arrived.add(attempt.id)
            self.take(MemberArrived(attempt=attempt.id))


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def started(commands: list[AnyCommand]) -> list[Attempt]:
    return [command.attempt for command in commands if isinstance(command, StartAttempt)]


def test_a_group_waits_for_all_its_slots_and_no_sample_passes_it() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=4, ordered=True))
    (first,) = started(plan.handle(SampleOpened(instance=1, sample=0), 0.0))
    group = GroupMembership(group=7, size=4)
    for sample in range(4):
        assert started(plan.handle(SampleOpened(instance=2, sample=sample, group=group), 0.0)) == []
    assert started(plan.handle(SampleOpened(instance=3, sample=0), 0.0)) == []

    commands = plan.handle(VerdictCommitted(result=passed(first.id)), 0.0)

    assert [attempt.group for attempt in started(commands)] == [7, 7, 7, 7]


def test_stragglers_are_cut_when_the_quorum_has_waited_for_them() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, ordered=True))
    group = GroupMembership(group=1, size=2, terms=GroupTerms(quorum=1, patience=5.0))
    plan.handle(SampleOpened(instance=1, sample=0, group=group), 0.0)
    fast, slow = started(plan.handle(SampleOpened(instance=1, sample=1, group=group), 0.0))

    assert SetTimer(at=6.0) in plan.handle(MemberArrived(attempt=fast.id), 1.0)
    (cut,) = plan.handle(TimerFired(), 6.0)

    assert isinstance(cut, EndAttempt)
    assert (cut.attempt, cut.failure.where, cut.failure.kind) == (slow.id, FailureOrigin.LIMIT, STRAGGLER)


def test_a_member_that_fails_for_good_is_replaced_as_often_as_requested() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, retries=0, ordered=True))
    group = GroupMembership(group=1, size=1, terms=GroupTerms(replace=1))
    (first,) = started(plan.handle(SampleOpened(instance=1, sample=0, group=group), 0.0))

    commands = plan.handle(
        VerdictCommitted(result=VerdictSummary(attempt=first.id, where=FailureOrigin.MODEL)), 0.0
    )
    assert ReplaceMember(group=1, instance=1) in commands
    (second,) = started(plan.handle(SampleOpened(instance=1, sample=1, group=group), 0.0))
    commands = plan.handle(
        VerdictCommitted(result=VerdictSummary(attempt=second.id, where=FailureOrigin.MODEL)), 0.0
    )

    assert GroupClosed(group=1) in commands and not any(
        isinstance(command, ReplaceMember) for command in commands
    )
