"""The consequences of a verdict: score, critic, another try and its delay, grading of kept work, reopening.

Pure functions over the failure table. The planner acts on verdicts, `run/conductor/regrade.py` on kept work,
and `run/setup/resumption.py` on closed samples that a resume opens again.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from .config import CriticKind, KeepRule, RunConfig
from .failures import (
    DAEMON,
    DISK,
    POISON,
    RULES,
    UNRESTORED,
    FailureRule,
    RetryRule,
    ScoreRule,
    double_delay,
    is_outage,
)
from .groups import CLIENT_GONE
from .records import AttemptFailure, AttemptPhase, FailureOrigin, Grade, KeptFile, KeptWork, Record, Verdict

LARGEST_SCALE = 8
LOSSES_BEFORE_ALONE = 2
LONGEST_BACKOFF = 60.0


class PlannerPolicy(Record, frozen=True):
    """The part of a run's configuration that the planner's decisions depend on."""

    concurrency: int
    attempts: int = 1
    retries: int = 2
    critic: str = CriticKind.GRADE
    backoff: float = 1.0
    losses_before_alone: int = LOSSES_BEFORE_ALONE
    most_losses: int = 10  # workers that a sample may lose to kills from outside before it is closed
    alone_at_once: int = 2
    preemptions: int = 3  # after this many preemptions an attempt is left to finish
    ordered: bool = False  # samples are opened as they are ordered; none is pulled
    regrading: bool = False  # kept work is graded again, without running agents

    @classmethod
    def of(cls, config: RunConfig, *, regrading: bool = False) -> PlannerPolicy:
        return cls(
            concurrency=config.slots,
            attempts=config.attempts,
            retries=config.retries,
            critic=config.critic,
            backoff=config.backoff,
            alone_at_once=max(1, config.workers),
            ordered=config.serving is not None and not regrading,
            regrading=regrading,
        )


class VerdictSummary(Record, frozen=True):
    """The part of a verdict that the planner needs. It is small, so that a log of many stays small."""

    attempt: int
    where: FailureOrigin | None = None
    kind: str = ""
    again: bool = True
    after: float = 0.0
    passed: bool | None = None
    score: float | None = None
    patched: bool = False  # it left a non-empty patch; without patches in the suite, any work
    critic_satisfied: bool | None = None  # result of a user-defined critic
    group_scored: bool = False  # whether it was scored with its group
    work: int | None = None  # the attempt whose kept work the next try grades; None: the agent acts again

    @classmethod
    def of(cls, verdict: Verdict) -> VerdictSummary:
        failure, grade = verdict.failure, verdict.grade
        return cls(
            attempt=verdict.attempt,
            where=failure.where if failure else None,
            kind=failure.kind if failure else "",
            again=failure.again if failure else True,
            after=failure.after if failure else 0.0,
            passed=grade.passed if grade else None,
            score=grade.score if grade else None,
            patched=verdict.salvage is not None if verdict.patch is None else verdict.patch > 0,
            critic_satisfied=verdict.critic_satisfied,
            group_scored=verdict.group_scored,
            work=work_to_grade(verdict),
        )

    @property
    def rule(self) -> FailureRule | None:
        return RULES[self.where] if self.where else None

    @property
    def is_outage(self) -> bool:
        return is_outage(self.where, self.kind)


class TryCounts(msgspec.Struct):
    """The tries that a sample has used so far."""

    round: int = 1
    retries: int = 0  # retries in this round
    scale: int = 1
    first: int = 1  # the round from which `--attempts` counts


class NextTry(Record, frozen=True):
    """Another try at the sample, with these counts, after at least `delay` seconds."""

    round: int
    retries: int
    scale: int
    delay: float = 0.0


def decide(result: VerdictSummary, spent: TryCounts, policy: PlannerPolicy) -> NextTry | None:
    """Return the next try after a verdict that counts, or None to close the sample."""
    if satisfies_critic(result, policy.critic):
        return None
    if policy.regrading and (result.passed is not None or result.kind == UNRESTORED):
        return None
    rule = result.rule
    if rule is not None and rule.again is RetryRule.NEVER:
        return None
    if rule is not None and result.again and _retries_left(rule, spent, policy):
        scale = min(spent.scale * 2, LARGEST_SCALE) if rule.grows else spent.scale
        delay = backoff(result, spent.retries, policy)
        return NextTry(round=spent.round, retries=spent.retries + 1, scale=scale, delay=delay)
    rounds_left = spent.round - spent.first + 1 < policy.attempts and not policy.regrading
    if result.where is not FailureOrigin.WORKER and rounds_left:
        return NextTry(round=spent.round + 1, retries=0, scale=spent.scale)
    return None


def _retries_left(rule: FailureRule, spent: TryCounts, policy: PlannerPolicy) -> bool:
    """Whether a retry is left.

    A low `--retries` does not stop growth: an attempt may grow to the largest scale in any case.
    """
    grows = rule.grows and spent.scale < LARGEST_SCALE and policy.retries > 0
    return rule.again is RetryRule.RETRIES and (grows or spent.retries < policy.retries)


def satisfies_critic(result: VerdictSummary, critic: str) -> bool:
    """Whether the critic requires no further attempt.

    A verdict that cannot be scored yet satisfies no critic.
    """
    kind = outcome_kind(result, spent=False)
    if kind not in ("passed", "failed"):
        return False
    finished = result.where is None
    by_verdict: dict[str, bool] = {
        CriticKind.GRADE: kind == "passed",
        CriticKind.FINISHED: finished,
        CriticKind.FINISHED_WITH_PATCH: finished and result.patched,
        CriticKind.PATCH: result.patched,
    }
    return by_verdict.get(critic, bool(result.critic_satisfied))


def outcome_kind(result: VerdictSummary, *, spent: bool) -> str:
    """Return `passed`, `failed`, or the origin of an unscored failure. `spent`: no try follows."""
    rule = result.rule
    if rule is None:
        return "passed" if result.passed else "failed"
    counts = {
        ScoreRule.YES: True,
        ScoreRule.PASS_OR_SPENT: bool(result.passed) or spent,
        ScoreRule.PASS_ONLY: bool(result.passed),
        ScoreRule.NO: False,
    }[rule.scored]
    if not counts:
        return str(result.where)
    return "passed" if result.passed else "failed"


def backoff(result: VerdictSummary, retries: int, policy: PlannerPolicy) -> float:
    """Return a doubling delay, at least Retry-After.

    The jitter is deterministic, so that a rebuilt planner computes the same delay.
    """
    doubled = double_delay(policy.backoff, retries + 1, LONGEST_BACKOFF)
    return max(doubled * (0.5 + _jitter(result.attempt, retries)), result.after)


def _jitter(attempt: int, retries: int) -> float:
    """Return a number in [0, 1) that is spread evenly over attempts (Knuth's multiplicative hash)."""
    return ((attempt * 31 + retries) * 2654435761 % 2**32) / 2**32


def rank(result: VerdictSummary) -> tuple[int, float, int]:
    """Return the sort key of a verdict within its sample.

    A pass ranks highest, then scored verdicts by score, then unscored ones; among equals, the later one.
    """
    kind = outcome_kind(result, spent=False)
    tier = {"passed": 2, "failed": 1}.get(kind, 0)
    return tier, result.score or 0.0, result.attempt


def keeps(keep: KeepRule, outcome: str | None) -> bool:
    """Whether the files of a sample with this outcome are kept; an open sample needs its files."""
    return outcome is None or keep is KeepRule.ALL or (keep is KeepRule.FAILURES and outcome != "passed")


def explain_not_kept(keep: str) -> str:
    """Return the text for files that were dropped on purpose."""
    return f"not kept (`--keep {keep}`)"


def verdict_kind(failure: AttemptFailure | None, passed: bool | None) -> str:
    """Return the word by which a single verdict is counted."""
    result = VerdictSummary(attempt=0, where=failure.where if failure else None, passed=passed)
    return outcome_kind(result, spent=False)


def grade_counts(failure: AttemptFailure | None, grade: Grade | None) -> bool:
    """Whether the grade counts in any case. A group does not wait for such a member any longer."""
    return grade is not None and verdict_kind(failure, grade.passed) in ("passed", "failed")


def exit_status(kind: str, where: FailureOrigin | None) -> int:
    """Return the exit status that one outcome requires of its run."""
    return RULES[where].exit_status if where is not None and kind != "passed" else 0


# Kept work: which work can be graded without running its agent.


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


# Closed samples: which of them a resume opens again, and in which round each continues.


class RetryChoice(StrEnum):
    """The groups of closed samples that `--retry` accepts. Any other word is a pattern over instance ids."""

    FAILED = "failed"  # samples that were graded and did not pass
    INFRASTRUCTURE = "infrastructure"  # failures that set the exit status, without poison
    POISON = "poison"  # samples that crashed their workers
    ALL = "all"  # all samples that did not pass


class ClosedSample(Record, frozen=True):
    """A sample with an outcome, and the state of its last attempt."""

    instance: int
    sample: int
    name: str  # the instance's id
    kind: str  # kind of the outcome
    where: FailureOrigin | None
    failure: str  # kind of the failure behind the outcome
    number: int  # attempts so far
    round: int

    @property
    def poison(self) -> bool:
        return self.where is FailureOrigin.WORKER and self.failure == POISON

    @property
    def infrastructure(self) -> bool:
        return exit_status(self.kind, self.where) != 0

    @property
    def abandoned(self) -> bool:
        """Whether the sample was cancelled because its client was gone."""
        return self.where is FailureOrigin.CANCELLED and self.failure == CLIENT_GONE

    @property
    def next_round(self) -> int:
        """The round to continue in.

        A sample that failed through no fault of its agent stays in its round and gets its recorded replies
        again.
        """
        return self.round if self.infrastructure or self.abandoned else self.round + 1


def is_chosen(closed: ClosedSample, choices: Sequence[str]) -> bool:
    """Whether one of the choices opens the sample again. A passed sample stays closed."""
    return closed.kind != "passed" and any(_matches(closed, choice) for choice in choices)


def _matches(closed: ClosedSample, choice: str) -> bool:
    match choice:
        case RetryChoice.ALL:
            return True
        case RetryChoice.FAILED:
            return closed.kind == "failed"
        case RetryChoice.POISON:
            return closed.poison
        case RetryChoice.INFRASTRUCTURE:
            return closed.infrastructure and not closed.poison
    return fnmatch.fnmatchcase(closed.name, choice)
