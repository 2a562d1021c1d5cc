"""The rows that a `LedgerReader` returns: instances, outcomes, attempts and events, as records."""

from __future__ import annotations

from ..core.records import FailureOrigin, ModelUsage, PhaseTimes, Record, Verdict


class InstanceRow(Record, frozen=True):
    id: int
    name: str
    place: str
    digest: bytes


class OutcomeRow(Record, frozen=True):
    """The outcome of a sample; usage and times are of the chosen attempt, `spent` is of all attempts.

    If the chosen attempt graded kept work, usage and times are of the attempt in which the agent acted.
    """

    instance: str
    row: int  # the instance's row
    sample: int
    kind: str
    score: float | None
    where: FailureOrigin | None
    failure: str  # the message of the failure
    attempts: int
    attempt: int  # the chosen one
    usage: ModelUsage
    times: PhaseTimes
    closed: float
    spent: ModelUsage = ModelUsage()
    regrade: str = ""  # `not regraded: ` and the reason, if the last regrade kept this outcome


class AttemptRow(Record, frozen=True):
    """An attempt, and its verdict once it is settled."""

    attempt: int
    instance: str
    row: int
    sample: int
    number: int
    round: int
    scale: int
    alone: bool
    regrades: int | None
    token: int
    started: float
    settled: float | None
    kind: str | None
    verdict: Verdict | None
    dropped: str | None = None  # the `--keep` rule by which its files were dropped


class EventRow(Record, frozen=True):
    at: float
    kind: str
    message: str
    attempt: int | None
    token: int
