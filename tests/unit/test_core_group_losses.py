"""Groups whose members are lost when they are nearly done: nobody is scored apart, or cut for nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from holdwater.core.events import (
    AnyCommand,
    End,
    Joined,
    Membership,
    Opened,
    Rally,
    Refuse,
    Settled,
    Start,
    Wake,
    Woke,
)
from holdwater.core.groups import STRAGGLER, GroupTerms
from holdwater.core.plan import Plan
from holdwater.core.policy import Policy, Result
from holdwater.core.records import Attempt, Where

LOST = Result(attempt=0, where=Where.WORKER, kind="lost")


def passed(attempt: int) -> Result:
    return Result(attempt=attempt, passed=True, score=1.0)


def started(commands: list[AnyCommand]) -> list[Attempt]:
    return [command.attempt for command in commands if isinstance(command, Start)]


def pair(plan: Plan, **terms_: Any) -> list[int]:
    """A group of two that has been started: its attempts."""
    group = Membership(group=1, size=2, terms=GroupTerms(**terms_))
    plan.handle(Opened(instance=1, sample=0, group=group), 0.0)
    return [attempt.id for attempt in started(plan.handle(Opened(instance=1, sample=1, group=group), 0.0))]


def again(plan: Plan, result: Result, attempt: int, at: float = 0.0) -> int:
    """A verdict after which another attempt is started at once."""
    (attempt_,) = started(plan.handle(Settled(result=msgspec.structs.replace(result, attempt=attempt)), at))
    return attempt_.id


def test_who_is_lost_when_another_was_scored_and_is_over_is_not_scored_together_with_nobody() -> None:
    plan = Plan(Policy(concurrency=2, ordered=True))
    one, other = pair(plan)
    plan.handle(Joined(attempt=one), 0.0)
    assert plan.handle(Joined(attempt=other), 0.0) == [Rally(group=1, together=True)]
    plan.handle(Settled(result=msgspec.structs.replace(passed(one), together=True)), 0.0)

    other = again(plan, LOST, other)

    assert plan.handle(Joined(attempt=other), 0.0) == [Rally(group=1, together=False)]


def test_who_is_back_waits_for_those_whose_scoring_failed_with_its_own() -> None:
    plan = Plan(Policy(concurrency=2, backoff=0.0, ordered=True))
    one, other = pair(plan)
    plan.handle(Joined(attempt=one), 0.0)
    plan.handle(Joined(attempt=other), 0.0)
    failed = Result(attempt=0, where=Where.GRADE)

    one = again(plan, failed, one)
    assert plan.handle(Joined(attempt=one), 0.0) == []
    other = again(plan, failed, other)

    assert plan.handle(Joined(attempt=other), 0.0) == [Rally(group=1, together=True)]


def test_a_quorum_that_is_lost_cuts_nobody() -> None:
    plan = Plan(Policy(concurrency=2, ordered=True))
    fast, _ = pair(plan, quorum=1, patience=5.0)
    plan.handle(Joined(attempt=fast), 1.0)

    fast = again(plan, LOST, fast, 2.0)
    assert plan.handle(Woke(), 6.0) == []

    assert Wake(at=12.0) in plan.handle(Joined(attempt=fast), 7.0)
    assert isinstance(plan.handle(Woke(), 12.0)[0], End)


def test_who_was_there_in_time_is_tried_again_although_stragglers_were_cut() -> None:
    plan = Plan(Policy(concurrency=2, ordered=True))
    fast, slow = pair(plan, quorum=1, patience=5.0)
    plan.handle(Joined(attempt=fast), 1.0)
    plan.handle(Woke(), 6.0)

    (refused,) = plan.handle(Settled(result=msgspec.structs.replace(LOST, attempt=slow)), 7.0)
    assert isinstance(refused, Refuse) and refused.failure.kind == STRAGGLER

    assert again(plan, LOST, fast, 7.0)
