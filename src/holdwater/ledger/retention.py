"""What a run does not keep: which attempts were dropped, written down before their files go.

A row without `bytes` is on its way: whoever was stopped in between, another goes on. During a run that is
`run/retention.py`, for old runs `prune.py`; what the files are is in `files.py`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from ..core.config import Keep
from ..core.records import Record
from .directory import RunDirectory
from .files import attempt_files, remove


class Removed(Record, frozen=True):
    """What came of removing the files of some attempts."""

    freed: dict[int, int]  # attempt -> bytes
    failed: dict[int, str]  # attempt -> why something of it is still there


def drop_sample(connection: sqlite3.Connection, sample: tuple[int, int], keep: Keep, now: float) -> None:
    """Write that nothing of a sample's attempts is kept but what the ledger has."""
    connection.execute(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep)"
        " SELECT id, ?, ? FROM attempt WHERE instance = ? AND sample = ? AND settled IS NOT NULL",
        (now, keep.value, *sample),
    )


def drop(connection: sqlite3.Connection, attempts: Iterable[int], keep: Keep, now: float) -> None:
    """The same for attempts, in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep) VALUES (?, ?, ?)",
        ((attempt, now, keep.value) for attempt in attempts),
    )
    connection.execute("COMMIT")


def going(connection: sqlite3.Connection, limit: int) -> list[tuple[int, str]]:
    """Attempts that were dropped and whose files may still be there, each with its instance's name."""
    return connection.execute(
        "SELECT d.attempt, i.name FROM dropped d JOIN attempt a ON a.id = d.attempt"
        " JOIN instance i ON i.id = a.instance WHERE d.bytes IS NULL ORDER BY d.attempt LIMIT ?",
        (limit,),
    ).fetchall()


def gone(connection: sqlite3.Connection, freed: Mapping[int, int]) -> None:
    """Write that the files of attempts are gone."""
    connection.executemany(
        "UPDATE dropped SET bytes = ? WHERE attempt = ?",
        ((bytes_, attempt) for attempt, bytes_ in freed.items()),
    )


def remove_files(directory: RunDirectory, attempts: Iterable[tuple[int, str]]) -> Removed:
    """Remove what there is of attempts that were dropped. Blocks for as long as the disk takes."""
    freed: dict[int, int] = {}
    failed: dict[int, str] = {}
    for attempt, name in attempts:
        try:
            freed[attempt] = sum(remove(path) for path in attempt_files(directory, attempt, name))
        except OSError as error:
            failed[attempt] = f"cannot remove `{error.filename}`: {error.strerror}"
    return Removed(freed=freed, failed=failed)
