"""The failure table as data: for each place, who may try again, whether it is scored, what the exit says.

`policy.py` decides with it; the table in the docs is printed from it.
"""

from __future__ import annotations

from enum import StrEnum

from .records import Attempt, Failure, Record, Where


class Again(StrEnum):
    """Who may ask for another try."""

    ATTEMPTS = "--attempts"
    RETRIES = "--retries"
    FREE = "always, without blame"
    NEVER = "no"


class Scored(StrEnum):
    """What a grade is worth when the attempt failed here."""

    YES = "yes, on what it left"
    PASS_OR_SPENT = "a pass counts; a zero only when retries are spent"
    PASS_ONLY = "a pass counts, never a zero"
    NO = "no"


class Rule(Record, frozen=True):
    again: Again
    scored: Scored
    exit_status: int
    grows: bool = False  # another try gets twice the resources


RULES: dict[Where, Rule] = {
    Where.AGENT: Rule(again=Again.ATTEMPTS, scored=Scored.YES, exit_status=0),
    Where.LIMIT: Rule(again=Again.ATTEMPTS, scored=Scored.YES, exit_status=0),
    Where.RESOURCE: Rule(again=Again.RETRIES, scored=Scored.PASS_OR_SPENT, exit_status=1, grows=True),
    Where.MODEL: Rule(again=Again.RETRIES, scored=Scored.NO, exit_status=1),
    Where.IMAGE: Rule(again=Again.RETRIES, scored=Scored.PASS_ONLY, exit_status=1),
    Where.SANDBOX: Rule(again=Again.RETRIES, scored=Scored.PASS_ONLY, exit_status=1),
    Where.GRADE: Rule(again=Again.RETRIES, scored=Scored.PASS_ONLY, exit_status=1),
    Where.WORKER: Rule(again=Again.FREE, scored=Scored.NO, exit_status=1),
    Where.BUDGET: Rule(again=Again.NEVER, scored=Scored.NO, exit_status=1),
    Where.INTERRUPTED: Rule(again=Again.FREE, scored=Scored.NO, exit_status=3),
    Where.CANCELLED: Rule(again=Again.NEVER, scored=Scored.NO, exit_status=0),
    Where.RUN: Rule(again=Again.NEVER, scored=Scored.NO, exit_status=4),
}

CRASHED = "crashed"  # took a worker down while alone in it, for the first time
POISON = "poison"  # did so once more
DISK = "disk"
DAEMON = "daemon"
UNRESTORED = "unrestored"  # kept work cannot be put back
NOT_SUBMITTED = "not-submitted"  # predictions that leave an instance out


def worker_lost(attempt: Attempt, reason: str, *, own: bool) -> Failure:
    """The failure of an attempt whose worker died or hung.

    `own`: by the worker's own doing, not by a kill from outside. Poison needs that twice, alone in a worker.
    """
    if not (own and attempt.alone):
        return Failure(where=Where.WORKER, kind="lost", message=f"its worker was lost: {reason}")
    again = attempt.crashes == 0
    return Failure(
        where=Where.WORKER,
        kind=CRASHED if again else POISON,
        message=f"took its worker down while alone in it: {reason}",
        hint="the agent crashes the process that hosts it; see the worker's log in the run's `logs/`",
        again=again,
    )


def interrupted(reason: str) -> Failure:
    return Failure(where=Where.INTERRUPTED, kind="interrupted", message=reason)


def disk_full() -> Failure:
    """The failure of an attempt that the run's own disk was too full for: nobody's fault."""
    return Failure(where=Where.INTERRUPTED, kind=DISK, message="the run's disk was full")


def daemon_died() -> Failure:
    """The failure of an attempt whose containers' daemon died while it lived: nobody's fault."""
    return Failure(where=Where.INTERRUPTED, kind=DAEMON, message="the docker daemon died")
