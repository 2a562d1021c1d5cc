"""Which closed samples a resume opens again, and in which round each goes on.

Pure: `ledger/reopening.py` writes it down, `run/resumption.py` starts it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum

from .failures import POISON
from .groups import CLIENT_GONE
from .policy import exit_status
from .records import Record, Where


class Retry(StrEnum):
    """The closed samples that `--retry` names. Any other word is a pattern over instance ids."""

    FAILED = "failed"  # graded, and did not pass
    INFRASTRUCTURE = "infrastructure"  # the exit status counts them; poison is not among them
    POISON = "poison"  # took their workers down
    ALL = "all"  # did not pass


class ClosedSample(Record, frozen=True):
    """A sample with an outcome, and how its last attempt stood."""

    instance: int
    sample: int
    name: str  # the instance's id
    kind: str  # of the outcome
    where: Where | None
    failure: str  # the kind of the failure behind the outcome
    number: int  # attempts so far
    round: int

    @property
    def poison(self) -> bool:
        return self.where is Where.WORKER and self.failure == POISON

    @property
    def infrastructure(self) -> bool:
        return exit_status(self.kind, self.where) != 0

    @property
    def abandoned(self) -> bool:
        """It was cancelled because its client was gone."""
        return self.where is Where.CANCELLED and self.failure == CLIENT_GONE

    @property
    def next_round(self) -> int:
        """Nobody's zero goes on in its round, whose recorded replies it gets again."""
        return self.round if self.infrastructure or self.abandoned else self.round + 1


def is_chosen(closed: ClosedSample, choices: Sequence[str]) -> bool:
    """Whether one of the choices opens the sample again. A pass stays."""
    return closed.kind != "passed" and any(_matches(closed, choice) for choice in choices)


def _matches(closed: ClosedSample, choice: str) -> bool:
    match choice:
        case Retry.ALL:
            return True
        case Retry.FAILED:
            return closed.kind == "failed"
        case Retry.POISON:
            return closed.poison
        case Retry.INFRASTRUCTURE:
            return closed.infrastructure and not closed.poison
    return fnmatch.fnmatchcase(closed.name, choice)
