"""Which kept work is graded without its agent, and which grades of it count."""

from __future__ import annotations

import msgspec
import pytest

from holdwater.core.failures import DAEMON, DISK, UNRESTORED
from holdwater.core.policy import find_kept_work, refuse_grade, refuse_grading, work_to_grade
from holdwater.core.records import (
    AttemptFailure,
    AttemptPhase,
    FailureOrigin,
    Grade,
    KeptWork,
    PhaseTimes,
    Salvage,
    Verdict,
)

AWAY = AttemptFailure(
    where=FailureOrigin.GRADE, kind="error", message="the grader is away", phase=AttemptPhase.GRADING
)
KEPT = KeptWork(attempt=3)
BAD = Grade(passed=False, score=0.0)


def ended(where: FailureOrigin, kind: str = "error") -> AttemptFailure:
    return AttemptFailure(where=where, kind=kind, message="it broke")


def verdict(failure: AttemptFailure | None = AWAY, grade: Grade | None = None, **kept: object) -> Verdict:
    return Verdict(
        attempt=4, token=1, failure=failure, grade=grade, kept=msgspec.structs.replace(KEPT, **kept)
    )


def test_work_whose_grading_failed_is_graded_next():
    assert work_to_grade(verdict()) == 3
    assert work_to_grade(verdict(ended(FailureOrigin.INTERRUPTED))) == 3
    late = msgspec.structs.replace(KEPT, failure=ended(FailureOrigin.LIMIT))
    assert work_to_grade(msgspec.structs.replace(verdict(), kept=late)) == 3


@pytest.mark.parametrize(
    "told",
    [
        verdict(grade=BAD),
        verdict(lacks="a file is too large"),
        verdict(outside=2),
        verdict(steps=2),
        verdict(ended(FailureOrigin.SANDBOX, UNRESTORED)),
        verdict(ended(FailureOrigin.INTERRUPTED, DISK)),
        verdict(ended(FailureOrigin.INTERRUPTED, DAEMON)),
        msgspec.structs.replace(verdict(), kept=None),
    ],
)
def test_an_agent_acts_again_where_its_work_is_no_use(told):
    assert work_to_grade(told) is None


@pytest.mark.parametrize(
    "where", [FailureOrigin.MODEL, FailureOrigin.RESOURCE, FailureOrigin.SANDBOX, FailureOrigin.INTERRUPTED]
)
def test_work_that_ended_without_a_fault_of_its_agent_is_not_graded(where):
    kept = msgspec.structs.replace(KEPT, failure=ended(where))

    assert work_to_grade(msgspec.structs.replace(verdict(), kept=kept)) is None


def test_only_a_pass_counts_where_work_outside_is_not_kept():
    assert refuse_grade(verdict(None, BAD, outside=2)).startswith("only a pass counts: 2 paths")
    assert refuse_grade(verdict(None, Grade(passed=True, score=1.0), outside=2)) == ""
    assert refuse_grade(verdict(None, BAD)) == ""


def test_a_regrade_refuses_work_that_was_never_done_or_is_not_scored():
    outage = msgspec.structs.replace(KEPT, failure=ended(FailureOrigin.MODEL))

    assert refuse_grading(Verdict(attempt=1, token=1)) == "the agent did not act"
    assert "not scored: model" in refuse_grading(Verdict(attempt=1, token=1, kept=outage))
    assert refuse_grading(verdict(lacks="a file is too large")) == "a file is too large"
    assert refuse_grading(verdict(outside=2)) == ""


def test_a_verdict_of_an_older_version_says_what_its_work_is():
    old = Verdict(
        attempt=7,
        token=1,
        failure=AWAY,
        times=PhaseTimes(acting=1.0),
        salvage=Salvage(name="000007.tar.zst", files=1, bytes=9),
        patch=5,
    )

    kept = find_kept_work(old)

    assert kept is not None and (kept.attempt, kept.failure) == (7, None)
    assert kept.salvage is not None and (kept.salvage.name, kept.salvage.bytes) == ("000007.tar.zst", 9)
    assert kept.patch is not None and (kept.patch.name, kept.patch.bytes) == ("000007.patch", 5)
    assert work_to_grade(old) is None, "its completeness is not known"
