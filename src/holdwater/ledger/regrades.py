"""The regrades of a run: new grades lie beside the outcomes, and take their place together at the end.

`book.py` calls the statements in its transactions, readers ask `latest_regrade`. Which work a regrade grades
is decided in `run/regrade.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ..core.kept_work import refuse_grade
from ..core.records import Outcome, Verdict, Where
from ..core.summary import RegradeState
from ..core.text import clean_text

if TYPE_CHECKING:
    from .reader import Reader

NOT_REGRADED = "not regraded: "  # what the row of an outcome that stays begins with


def begin_regrade(connection: sqlite3.Connection, grader: str, only: tuple[str, ...], now: float) -> int:
    """A new regrade. An open one is given up: its grades never become outcomes."""
    connection.execute("UPDATE regrade SET ended = ?, switched = 0 WHERE ended IS NULL", (now,))
    cursor = connection.execute(
        "INSERT INTO regrade (grader, patterns, started) VALUES (?, ?, ?)",
        (clean_text(grader), msgspec.json.encode(only).decode(), now),
    )
    return cursor.lastrowid or 0


def put_grade(connection: sqlite3.Connection, regrade: int, outcome: Outcome, verdict: Verdict) -> None:
    """Write what a sample becomes at the end; one that could not be graded stays as it is."""
    failure = verdict.failure
    if verdict.grade is None:
        why = f"{failure.where}: {failure.message}" if failure else "there is no grade"
        keep_outcome(connection, regrade, (outcome.instance, outcome.sample), why, outcome.where)
        return
    if why := refuse_grade(verdict):
        keep_outcome(connection, regrade, (outcome.instance, outcome.sample), why, None)
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
    connection: sqlite3.Connection, regrade: int, sample: tuple[int, int], why: str, where: Where | None
) -> None:
    """Write why the outcome of a sample stays; `where` is the failure that kept it from a grade."""
    connection.execute(
        "INSERT OR REPLACE INTO regraded (regrade, instance, sample, refused, place) VALUES (?, ?, ?, ?, ?)",
        (regrade, *sample, clean_text(why), where and where.value),
    )


def new_outcomes(connection: sqlite3.Connection, regrade: int) -> Iterator[Outcome]:
    """The outcomes that take the place of the old ones."""
    rows = connection.execute(
        "SELECT instance, sample, attempt, kind, score, place FROM regraded"
        " WHERE regrade = ? AND attempt IS NOT NULL ORDER BY instance, sample",
        (regrade,),
    ).fetchall()
    for instance, sample, attempt, kind, score, place in rows:
        where = Where(place) if place else None
        yield Outcome(instance=instance, sample=sample, attempt=attempt, kind=kind, score=score, where=where)


def end_regrade(connection: sqlite3.Connection, regrade: int, now: float) -> None:
    connection.execute("UPDATE regrade SET ended = ?, switched = 1 WHERE id = ?", (now, regrade))


def state_before(connection: sqlite3.Connection, token: int) -> tuple[str, str, int] | None:
    """How the run itself was left, where it was left unfinished: a regrade does not finish it."""
    row = connection.execute(
        "SELECT state, reason, exit_status FROM conductor WHERE token < ? AND regrade IS NULL"
        " ORDER BY token DESC LIMIT 1",
        (token,),
    ).fetchone()
    if row is None or row[0] == "finished":
        return None
    state, reason, status = row
    return (state, reason, status) if state else ("interrupted", "`holdwater resume` continues the run", 3)


def latest_regrade(reader: Reader) -> RegradeState | None:
    """The regrade that is open, or else the one that made the outcomes what they are."""
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


def refusal(reader: Reader, instance: int, sample: int) -> str:
    """Why the outcome of a sample is not that of its last regrade; empty: it is, or it was never to be."""
    rows = reader.rows(
        "SELECT refused FROM regraded WHERE regrade IN (SELECT id FROM regrade WHERE switched)"
        " AND instance = ? AND sample = ? ORDER BY regrade DESC LIMIT 1",
        (instance, sample),
    )
    return f"{NOT_REGRADED}{rows[0][0]}" if rows and rows[0][0] else ""


def refusals(reader: Reader, regrade: int) -> list[Where]:
    """Where the failures lie that kept outcomes of a regrade as they were, each once."""
    query = "SELECT DISTINCT place FROM regraded WHERE regrade = ? AND attempt IS NULL AND place IS NOT NULL"
    return [Where(place) for (place,) in reader.rows(query, (regrade,))]


def is_graded(reader: Reader, regrade: int, instance: int, sample: int) -> bool:
    """Whether the regrade is over for a sample."""
    query = "SELECT 1 FROM regraded WHERE regrade = ? AND instance = ? AND sample = ?"
    return bool(reader.rows(query, (regrade, instance, sample)))


def has_regrades(reader: Reader) -> bool:
    """An older ledger has no such table and is read as it is."""
    return bool(reader.rows("SELECT 1 FROM sqlite_master WHERE name = 'regrade'"))
