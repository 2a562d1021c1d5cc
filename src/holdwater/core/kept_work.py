"""Decides which kept work can be graded without running its agent, and why other work cannot.

Pure. `policy.py` uses it after a failed grading, `run/conductor/regrade.py` for every sample.
"""

from __future__ import annotations

from .failures import DAEMON, DISK, RULES, UNRESTORED, ScoreRule
from .records import AttemptPhase, FailureOrigin, KeptFile, KeptWork, Verdict


def find_kept_work(verdict: Verdict) -> KeptWork | None:
    """Return the work behind a verdict, also one of an older version; None: the agent did not act."""
    if verdict.kept is not None or not verdict.times.acting:
        return verdict.kept
    failure, salvage, name = verdict.failure, verdict.salvage, f"{verdict.attempt:06d}.patch"
    return KeptWork(
        attempt=verdict.attempt,
        failure=None if failure is None or failure.phase is AttemptPhase.GRADING else failure,
        salvage=None if salvage is None else KeptFile(name=salvage.name, bytes=salvage.bytes),
        patch=None if verdict.patch is None else KeptFile(name=name, bytes=verdict.patch),
    )


def list_kept_files(kept: KeptWork | None) -> list[KeptFile]:
    """Return the files in the run's `artifacts/` that hold the work."""
    return [] if kept is None else [file for file in (kept.salvage, kept.patch, kept.answer) if file]


def refuse_grading(verdict: Verdict) -> str:
    """Return why the work behind a verdict cannot be graded; empty: it can."""
    kept = find_kept_work(verdict)
    if kept is None:
        return "the agent did not act"
    if kept.failure is not None and RULES[kept.failure.where].scored is ScoreRule.NO:
        return f"the agent's time ended with a failure that is not scored: {kept.failure.where}"
    return kept.lacks


def refuse_grade(verdict: Verdict) -> str:
    """Return why a grade of kept work does not count; empty: it counts."""
    kept, grade = verdict.kept, verdict.grade
    if kept is None or grade is None or grade.passed or not kept.outside:
        return ""
    return f"only a pass counts: {kept.outside} paths outside the working directory are not kept"


def work_to_grade(verdict: Verdict) -> int | None:
    """Return the attempt whose kept work the next try grades; None: the agent has to act again."""
    kept, failure = verdict.kept, verdict.failure
    if kept is None or kept.lacks or kept.outside or kept.steps > 1 or verdict.grade is not None:
        return None
    if failure is not None and failure.kind == UNRESTORED:
        return None
    if failure is not None and failure.where is FailureOrigin.INTERRUPTED and failure.kind in (DISK, DAEMON):
        return None  # the fault may have affected the acting phase too
    finished = kept.failure is None or RULES[kept.failure.where].scored is ScoreRule.YES
    return kept.attempt if finished else None
