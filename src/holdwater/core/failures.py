"""The failure table as data: for each origin, the retry rule, the scoring rule and the exit status.

`policy.py` decides by this table; the table in the docs is generated from it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .records import Attempt, AttemptFailure, FailureOrigin, Record


class RetryRule(StrEnum):
    """The setting that allows another try."""

    ATTEMPTS = "--attempts"
    RETRIES = "--retries"
    FREE = "always, without blame"
    NEVER = "no"


class ScoreRule(StrEnum):
    """Whether a grade counts if the attempt failed with this origin."""

    YES = "yes, on what it left"
    PASS_OR_SPENT = "a pass counts; a zero only when retries are spent"
    PASS_ONLY = "a pass counts, never a zero"
    NO = "no"


class FailureRule(Record, frozen=True):
    again: RetryRule
    scored: ScoreRule
    exit_status: int
    grows: bool = False  # the next try gets twice the resources


RULES: dict[FailureOrigin, FailureRule] = {
    FailureOrigin.AGENT: FailureRule(again=RetryRule.ATTEMPTS, scored=ScoreRule.YES, exit_status=0),
    FailureOrigin.LIMIT: FailureRule(again=RetryRule.ATTEMPTS, scored=ScoreRule.YES, exit_status=0),
    FailureOrigin.RESOURCE: FailureRule(
        again=RetryRule.RETRIES, scored=ScoreRule.PASS_OR_SPENT, exit_status=1, grows=True
    ),
    FailureOrigin.MODEL: FailureRule(again=RetryRule.RETRIES, scored=ScoreRule.NO, exit_status=1),
    FailureOrigin.IMAGE: FailureRule(again=RetryRule.RETRIES, scored=ScoreRule.PASS_ONLY, exit_status=1),
    FailureOrigin.SANDBOX: FailureRule(again=RetryRule.RETRIES, scored=ScoreRule.PASS_ONLY, exit_status=1),
    FailureOrigin.GRADE: FailureRule(again=RetryRule.RETRIES, scored=ScoreRule.PASS_ONLY, exit_status=1),
    FailureOrigin.WORKER: FailureRule(again=RetryRule.FREE, scored=ScoreRule.NO, exit_status=1),
    FailureOrigin.BUDGET: FailureRule(again=RetryRule.NEVER, scored=ScoreRule.NO, exit_status=1),
    FailureOrigin.INTERRUPTED: FailureRule(again=RetryRule.FREE, scored=ScoreRule.NO, exit_status=3),
    FailureOrigin.CANCELLED: FailureRule(again=RetryRule.NEVER, scored=ScoreRule.NO, exit_status=0),
    FailureOrigin.RUN: FailureRule(again=RetryRule.NEVER, scored=ScoreRule.NO, exit_status=4),
}

CRASHED = "crashed"  # crashed a worker while alone in it, for the first time
POISON = "poison"  # crashed a worker while alone in it, once more
DISK = "disk"
UNRECORDED = "unrecorded"  # a replay whose record does not have the reply
DAEMON = "daemon"
SERVER = "server"  # the sandbox server, or the connection to it, was lost
TAKEN_BACK = "preempted"  # the sandbox server took the sandbox back
OUTAGES = frozenset((DAEMON, SERVER, TAKEN_BACK))  # kinds of interruptions in which the sandbox was lost
MOST_OUTAGES = 10  # sandboxes that a sample may lose before that counts as a failure of the sandbox
UNRESTORED = "unrestored"  # kept work cannot be restored
NOT_SUBMITTED = "not-submitted"  # predictions without an entry for the instance


def make_loss_failure(attempt: Attempt, reason: str, *, own: bool) -> AttemptFailure:
    """Return the failure of an attempt whose worker died or hung.

    `own`: the worker caused its own end, so it was not killed from outside. A sample is poison after two
    such ends while it was alone in its worker.
    """
    if not (own and attempt.alone):
        return AttemptFailure(
            where=FailureOrigin.WORKER, kind="lost", message=f"its worker was lost: {reason}"
        )
    again = attempt.crashes == 0
    return AttemptFailure(
        where=FailureOrigin.WORKER,
        kind=CRASHED if again else POISON,
        message=f"took its worker down while alone in it: {reason}",
        hint="the agent crashes the process that hosts it; see the worker's log in the run's `logs/`",
        again=again,
    )


def make_interrupt_failure(reason: str) -> AttemptFailure:
    return AttemptFailure(where=FailureOrigin.INTERRUPTED, kind="interrupted", message=reason)


def make_disk_failure() -> AttemptFailure:
    """Return the failure of an attempt for which the run's disk was too full: the attempt is not at fault."""
    return AttemptFailure(where=FailureOrigin.INTERRUPTED, kind=DISK, message="the run's disk was full")


def make_daemon_failure() -> AttemptFailure:
    """Return the failure of an attempt whose docker daemon died: the attempt is not at fault."""
    return AttemptFailure(where=FailureOrigin.INTERRUPTED, kind=DAEMON, message="the docker daemon died")


def is_outage(where: FailureOrigin | None, kind: str) -> bool:
    """Return whether such a failure is the loss of the machine of the sandbox: no attempt is at fault."""
    return where is FailureOrigin.INTERRUPTED and kind in OUTAGES


def make_outage_failure(failure: AttemptFailure, count: int) -> AttemptFailure:
    """Return the failure of an attempt that lost its sandbox once too often: there is no free retry."""
    return msgspec.structs.replace(
        failure,
        where=FailureOrigin.SANDBOX,
        message=f"the sample lost its sandbox {count} times, at last because: {failure.message}",
        hint="see the logs of the machine that has the sandboxes; `holdwater resume --retry infrastructure`",
        again=False,
    )


def double_delay(first: float, failures: int, longest: float) -> float:
    """Return the seconds before another try: `first` after one failure, doubled by each further one."""
    return min(longest, first * 2.0 ** min(failures - 1, 64))
