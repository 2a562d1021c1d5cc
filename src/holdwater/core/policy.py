"""What follows from a verdict: is it scored, is the critic satisfied, is there another try, and when.

Pure functions over the failure table. The planner asks them; nobody else decides.
"""

from __future__ import annotations

import msgspec

from .config import Critic, Keep, RunConfig
from .failures import RULES, UNRESTORED, Again, Rule, Scored
from .kept_work import work_to_grade
from .records import Failure, Grade, Record, Verdict, Where

LARGEST_SCALE = 8
LOSSES_BEFORE_ALONE = 2
LONGEST_BACKOFF = 60.0


class Policy(Record, frozen=True):
    """The part of a run's configuration that the planner decides by."""

    concurrency: int
    attempts: int = 1
    retries: int = 2
    critic: str = Critic.GRADE
    backoff: float = 1.0
    losses_before_alone: int = LOSSES_BEFORE_ALONE
    most_losses: int = 10  # workers that a sample may lose to kills from outside before it is closed
    alone_at_once: int = 2
    preemptions: int = 3  # after so many an attempt is left to finish
    ordered: bool = False  # samples are opened as they are ordered, none is pulled
    regrading: bool = False  # kept work is graded again, and no agent acts

    @classmethod
    def of(cls, config: RunConfig, *, regrading: bool = False) -> Policy:
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


class Result(Record, frozen=True):
    """What the planner needs to know of a verdict: small, so that a log of many costs little."""

    attempt: int
    where: Where | None = None
    kind: str = ""
    again: bool = True
    after: float = 0.0
    passed: bool | None = None
    score: float | None = None
    patched: bool = False  # it left a patch that is not empty; where the suite takes none, work
    enough: bool | None = None  # what a critic of the user's own says
    together: bool = False  # it was scored with its group
    work: int | None = None  # the attempt whose kept work the next try grades; None: the agent acts again

    @classmethod
    def of(cls, verdict: Verdict) -> Result:
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
            enough=verdict.enough,
            together=verdict.together,
            work=work_to_grade(verdict),
        )

    @property
    def rule(self) -> Rule | None:
        return RULES[self.where] if self.where else None


class Spent(msgspec.Struct):
    """What a sample has used up so far."""

    round: int = 1
    retries: int = 0  # in this round
    scale: int = 1
    first: int = 1  # the round from which `--attempts` counts


class Next(Record, frozen=True):
    """Another try at the sample, with these counts, not before `delay` seconds have passed."""

    round: int
    retries: int
    scale: int
    delay: float = 0.0


def decide(result: Result, spent: Spent, policy: Policy) -> Next | None:
    """The next try that a blamed verdict asks for, or None when the sample is to be closed."""
    if satisfied(result, policy.critic):
        return None
    if policy.regrading and (result.passed is not None or result.kind == UNRESTORED):
        return None
    rule = result.rule
    if rule is not None and rule.again is Again.NEVER:
        return None
    if rule is not None and result.again and _retries_left(rule, spent, policy):
        scale = min(spent.scale * 2, LARGEST_SCALE) if rule.grows else spent.scale
        delay = backoff(result, spent.retries, policy)
        return Next(round=spent.round, retries=spent.retries + 1, scale=scale, delay=delay)
    rounds_left = spent.round - spent.first + 1 < policy.attempts and not policy.regrading
    if result.where is not Where.WORKER and rounds_left:
        return Next(round=spent.round + 1, retries=0, scale=spent.scale)
    return None


def _retries_left(rule: Rule, spent: Spent, policy: Policy) -> bool:
    """Few retries do not keep an attempt from what it needs: it may grow to the largest in any case."""
    grows = rule.grows and spent.scale < LARGEST_SCALE and policy.retries > 0
    return rule.again is Again.RETRIES and (grows or spent.retries < policy.retries)


def satisfied(result: Result, critic: str) -> bool:
    """Whether the critic asks for no further attempt. What cannot be scored yet satisfies nobody."""
    kind = outcome_kind(result, spent=False)
    if kind not in ("passed", "failed"):
        return False
    finished = result.where is None
    by_verdict: dict[str, bool] = {
        Critic.GRADE: kind == "passed",
        Critic.FINISHED: finished,
        Critic.FINISHED_WITH_PATCH: finished and result.patched,
        Critic.PATCH: result.patched,
    }
    return by_verdict.get(critic, bool(result.enough))


def outcome_kind(result: Result, *, spent: bool) -> str:
    """`passed`, `failed`, or the place of a failure that is not scored. `spent`: no try will follow."""
    rule = result.rule
    if rule is None:
        return "passed" if result.passed else "failed"
    counts = {
        Scored.YES: True,
        Scored.PASS_OR_SPENT: bool(result.passed) or spent,
        Scored.PASS_ONLY: bool(result.passed),
        Scored.NO: False,
    }[rule.scored]
    if not counts:
        return str(result.where)
    return "passed" if result.passed else "failed"


def backoff(result: Result, retries: int, policy: Policy) -> float:
    """Doubling, with jitter that is the same each time it is asked for, and never less than Retry-After."""
    doubled = min(policy.backoff * 2.0 ** min(retries, 64), LONGEST_BACKOFF)
    return max(doubled * (0.5 + _jitter(result.attempt, retries)), result.after)


def _jitter(attempt: int, retries: int) -> float:
    """A number in [0, 1) that is spread evenly over attempts (Knuth's multiplicative hash)."""
    return ((attempt * 31 + retries) * 2654435761 % 2**32) / 2**32


def rank(result: Result) -> tuple[int, float, int]:
    """Orders a sample's verdicts: passed, then scored by score, then unscored; the later one of equals."""
    kind = outcome_kind(result, spent=False)
    tier = {"passed": 2, "failed": 1}.get(kind, 0)
    return tier, result.score or 0.0, result.attempt


def keeps(keep: Keep, outcome: str | None) -> bool:
    """Whether the files of a sample with this outcome stay; those of an open one are needed."""
    return outcome is None or keep is Keep.ALL or (keep is Keep.FAILURES and outcome != "passed")


def not_kept(keep: str) -> str:
    """How it is said that files were dropped on purpose."""
    return f"not kept (`--keep {keep}`)"


def verdict_kind(failure: Failure | None, passed: bool | None) -> str:
    """The word by which a single verdict is counted."""
    result = Result(attempt=0, where=failure.where if failure else None, passed=passed)
    return outcome_kind(result, spent=False)


def stands(failure: Failure | None, grade: Grade | None) -> bool:
    """Whether the grade counts, whatever follows: a group waits for nothing else of such a member."""
    return grade is not None and verdict_kind(failure, grade.passed) in ("passed", "failed")


def exit_status(kind: str, where: Where | None) -> int:
    """What one outcome does to the exit status of its run."""
    return RULES[where].exit_status if where is not None and kind != "passed" else 0
