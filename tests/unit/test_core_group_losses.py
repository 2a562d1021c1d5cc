"""Groups whose members are lost when they are nearly done: nobody is scored apart, or cut for nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from holdwater.core.events import (
    AnyCommand,
    EndAttempt,
    GroupMembership,
    MemberArrived,
    RefuseAttempt,
    SampleOpened,
    ScoreGroup,
    SetTimer,
    StartAttempt,
    TimerFired,
    VerdictCommitted,
)
from holdwater.core.groups import STRAGGLER, GroupTerms
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import PlannerPolicy, VerdictSummary
from holdwater.core.records import Attempt, FailureOrigin

LOST = VerdictSummary(attempt=0, where=FailureOrigin.WORKER, kind="lost")


def passed(attempt: int) -> VerdictSummary:
    return VerdictSummary(attempt=attempt, passed=True, score=1.0)


def started(commands: list[AnyCommand]) -> list[Attempt]:
    return [command.attempt for command in commands if isinstance(command, StartAttempt)]


def pair(plan: RunPlanner, **terms_: Any) -> list[int]:
    """A group of two that has been started: its attempts."""
    group = GroupMembership(group=1, size=2, terms=GroupTerms(**terms_))
    plan.handle(SampleOpened(instance=1, sample=0, group=group), 0.0)
    return [
        attempt.id for attempt in started(plan.handle(SampleOpened(instance=1, sample=1, group=group), 0.0))
    ]


def again(plan: RunPlanner, result: VerdictSummary, attempt: int, at: float = 0.0) -> int:
    """A verdict after which another attempt is started at once."""
    (attempt_,) = started(
        plan.handle(VerdictCommitted(result=msgspec.structs.replace(result, attempt=attempt)), at)
    )
    return attempt_.id


def test_a_member_lost_after_its_partner_was_scored_is_scored_alone() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, ordered=True))
    one, other = pair(plan)
    plan.handle(MemberArrived(attempt=one), 0.0)
    assert plan.handle(MemberArrived(attempt=other), 0.0) == [ScoreGroup(group=1, together=True)]
    plan.handle(VerdictCommitted(result=msgspec.structs.replace(passed(one), group_scored=True)), 0.0)

    other = again(plan, LOST, other)

    assert plan.handle(MemberArrived(attempt=other), 0.0) == [ScoreGroup(group=1, together=False)]


def test_who_is_back_waits_for_those_whose_scoring_failed_with_its_own() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, backoff=0.0, ordered=True))
    one, other = pair(plan)
    plan.handle(MemberArrived(attempt=one), 0.0)
    plan.handle(MemberArrived(attempt=other), 0.0)
    failed = VerdictSummary(attempt=0, where=FailureOrigin.GRADE)

    one = again(plan, failed, one)
    assert plan.handle(MemberArrived(attempt=one), 0.0) == []
    other = again(plan, failed, other)

    assert plan.handle(MemberArrived(attempt=other), 0.0) == [ScoreGroup(group=1, together=True)]


def test_a_lost_quorum_cuts_no_member() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, ordered=True))
    fast, _ = pair(plan, quorum=1, patience=5.0)
    plan.handle(MemberArrived(attempt=fast), 1.0)

    fast = again(plan, LOST, fast, 2.0)
    assert plan.handle(TimerFired(), 6.0) == []

    assert SetTimer(at=12.0) in plan.handle(MemberArrived(attempt=fast), 7.0)
    assert isinstance(plan.handle(TimerFired(), 12.0)[0], EndAttempt)


def test_who_was_there_in_time_is_tried_again_although_stragglers_were_cut() -> None:
    plan = RunPlanner(PlannerPolicy(concurrency=2, ordered=True))
    fast, slow = pair(plan, quorum=1, patience=5.0)
    plan.handle(MemberArrived(attempt=fast), 1.0)
    plan.handle(TimerFired(), 6.0)

    (refused,) = plan.handle(VerdictCommitted(result=msgspec.structs.replace(LOST, attempt=slow)), 7.0)
    assert isinstance(refused, RefuseAttempt) and refused.failure.kind == STRAGGLER

    assert again(plan, LOST, fast, 7.0)
