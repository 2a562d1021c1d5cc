"""Decides which closed samples a resume opens again, and in which round each continues.

Pure. `ledger/reopening.py` writes the decision, `run/setup/resumption.py` starts the samples.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from enum import StrEnum

from .failures import POISON
from .groups import CLIENT_GONE
from .policy import exit_status
from .records import FailureOrigin, Record


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
