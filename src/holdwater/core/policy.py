"""The consequences of a verdict: its score, the critic's decision, another try and its delay.

Pure functions over the failure table. Only the planner acts on them.
"""

from __future__ import annotations

import msgspec

from .config import CriticKind, KeepRule, RunConfig
from .failures import RULES, UNRESTORED, FailureRule, RetryRule, ScoreRule
from .kept_work import work_to_grade
from .records import AttemptFailure, FailureOrigin, Grade, Record, Verdict

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
    doubled = min(policy.backoff * 2.0 ** min(retries, 64), LONGEST_BACKOFF)
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
