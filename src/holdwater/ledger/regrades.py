"""The regrades of a run: new grades are stored beside the outcomes and replace them together at the end.

`statements.py` runs the writing functions in its transactions; readers call `latest_regrade`.
`run/conductor/regrade.py` decides which work is regraded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ..core.masking import clean_text
from ..core.policy import refuse_grade
from ..core.records import FailureOrigin, Outcome, Verdict
from ..core.summary import RegradeState

if TYPE_CHECKING:
    from .reader import LedgerReader

NOT_REGRADED = "not regraded: "  # the prefix of the reason in the row of an outcome that stays
SHORT_GROUP = "another sample of its group cannot be graded"


def begin_regrade(connection: sqlite3.Connection, grader: str, only: tuple[str, ...], now: float) -> int:
    """Begin a regrade; return its id. An open regrade is abandoned: its grades never become outcomes."""
    connection.execute("UPDATE regrade SET ended = ?, switched = 0 WHERE ended IS NULL", (now,))
    cursor = connection.execute(
        "INSERT INTO regrade (grader, patterns, started) VALUES (?, ?, ?)",
        (clean_text(grader), msgspec.json.encode(only).decode(), now),
    )
    return cursor.lastrowid or 0


def put_grade(
    connection: sqlite3.Connection, regrade: int, outcome: Outcome, verdict: Verdict, before: Verdict | None
) -> None:
    """Store the new outcome of a sample in place of `before`; without a grade, the outcome stays."""
    failure = verdict.failure
    if verdict.grade is None:
        why = f"{failure.where}: {failure.message}" if failure else "there is no grade"
        keep_outcome(connection, regrade, (outcome.instance, outcome.sample), why, outcome.where)
        return
    if why := refuse_grade(verdict):
        keep_outcome(connection, regrade, (outcome.instance, outcome.sample), why, None)
        return
    if before is not None and before.group_scored and not verdict.group_scored:
        keep_outcome(connection, regrade, (outcome.instance, outcome.sample), SHORT_GROUP, None)
        return
    connection.execute(
        "INSERT OR REPLACE INTO regraded (regrade, instance, sample, attempt, kind, score, place)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            *(regrade, outcome.instance, outcome.sample, outcome.attempt, outcome.kind, outcome.score),
            outcome.where and outcome.where.value,
        ),
    )


def keep_outcome(
    connection: sqlite3.Connection,
    regrade: int,
    sample: tuple[int, int],
    why: str,
    where: FailureOrigin | None,
) -> None:
    """Write why the outcome of a sample stays; `where` is the failure origin that prevented a grade."""
    connection.execute(
        "INSERT OR REPLACE INTO regraded (regrade, instance, sample, refused, place) VALUES (?, ?, ?, ?, ?)",
        (regrade, *sample, clean_text(why), where and where.value),
    )


def new_outcomes(connection: sqlite3.Connection, regrade: int) -> Iterator[Outcome]:
    """Yield the outcomes that replace the old ones."""
    rows = connection.execute(
        "SELECT instance, sample, attempt, kind, score, place FROM regraded"
        " WHERE regrade = ? AND attempt IS NOT NULL ORDER BY instance, sample",
        (regrade,),
    ).fetchall()
    for instance, sample, attempt, kind, score, place in rows:
        where = FailureOrigin(place) if place else None
        yield Outcome(instance=instance, sample=sample, attempt=attempt, kind=kind, score=score, where=where)


def end_regrade(connection: sqlite3.Connection, regrade: int, now: float) -> None:
    connection.execute("UPDATE regrade SET ended = ?, switched = 1 WHERE id = ?", (now, regrade))


def find_state_before(connection: sqlite3.Connection, token: int) -> tuple[str, str, int] | None:
    """Return state, reason and exit status of the run before the regrade; None if it was finished.

    A regrade does not finish an unfinished run.
    """
    row = connection.execute(
        "SELECT state, reason, exit_status FROM conductor WHERE token < ? AND regrade IS NULL"
        " ORDER BY token DESC LIMIT 1",
        (token,),
    ).fetchone()
    if row is None or row[0] == "finished":
        return None
    state, reason, status = row
    return (state, reason, status) if state else ("interrupted", "`holdwater resume` continues the run", 3)


def latest_regrade(reader: LedgerReader) -> RegradeState | None:
    """Return the open regrade, or else the last one whose grades became outcomes."""
    if not has_regrades(reader):
        return None
    rows = reader.rows(
        "SELECT id, grader, patterns, started, ended FROM regrade WHERE coalesce(switched, 1)"
        " ORDER BY ended IS NULL DESC, id DESC LIMIT 1"
    )
    if not rows:
        return None
    regrade, grader, patterns, started, ended = rows[0]
    graded, refused = reader.rows(
        "SELECT count(attempt), count(refused) FROM regraded WHERE regrade = ?", (regrade,)
    )[0]
    return RegradeState(
        id=regrade,
        grader=grader,
        only=msgspec.json.decode(patterns, type=tuple[str, ...]),
        started=started,
        ended=ended,
        graded=graded,
        refused=refused,
    )


def explain_refusal(reader: LedgerReader, instance: int, sample: int) -> str:
    """Return why the last regrade kept a sample's outcome; empty if it replaced it or did not include it."""
    rows = reader.rows(
        "SELECT refused FROM regraded WHERE regrade IN (SELECT id FROM regrade WHERE switched)"
        " AND instance = ? AND sample = ? ORDER BY regrade DESC LIMIT 1",
        (instance, sample),
    )
    return f"{NOT_REGRADED}{rows[0][0]}" if rows and rows[0][0] else ""


def list_refusals(reader: LedgerReader, regrade: int) -> list[FailureOrigin]:
    """Return the distinct origins of failures that prevented grades in a regrade."""
    query = "SELECT DISTINCT place FROM regraded WHERE regrade = ? AND attempt IS NULL AND place IS NOT NULL"
    return [FailureOrigin(place) for (place,) in reader.rows(query, (regrade,))]


def is_graded(reader: LedgerReader, regrade: int, instance: int, sample: int) -> bool:
    """Return whether a regrade has a result for a sample, graded or refused."""
    query = "SELECT 1 FROM regraded WHERE regrade = ? AND instance = ? AND sample = ?"
    return bool(reader.rows(query, (regrade, instance, sample)))


def has_regrades(reader: LedgerReader) -> bool:
    """Return whether the ledger has regrade tables: an older one has none and is read without migration."""
    return bool(reader.rows("SELECT 1 FROM sqlite_master WHERE name = 'regrade'"))
