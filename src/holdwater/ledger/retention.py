"""Records which attempts a run drops, before their files are deleted.

In a row without `bytes` the deletion is pending: if a process is stopped in between, the next one continues.
During a run `run/resources/retention.py` deletes, for old runs `pruning.py`; `files.py` names the files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping

from ..core.config import KeepRule
from ..core.records import Record
from .directory import RunDirectory
from .files import attempt_files, remove


class RemovalResult(Record, frozen=True):
    """The result of deleting the files of some attempts."""

    freed: dict[int, int]  # attempt -> bytes
    failed: dict[int, str]  # attempt -> why some of its files remain


def drop_sample(connection: sqlite3.Connection, sample: tuple[int, int], keep: KeepRule, now: float) -> None:
    """Write that the files of a sample's settled attempts are dropped; the ledger keeps their rows."""
    connection.execute(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep)"
        " SELECT id, ?, ? FROM attempt WHERE instance = ? AND sample = ? AND settled IS NOT NULL",
        (now, keep.value, *sample),
    )


def drop_attempts(
    connection: sqlite3.Connection, attempts: Iterable[int], keep: KeepRule, now: float
) -> None:
    """Write that the files of attempts are dropped, in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT OR IGNORE INTO dropped (attempt, at, keep) VALUES (?, ?, ?)",
        ((attempt, now, keep.value) for attempt in attempts),
    )
    connection.execute("COMMIT")


def pending_deletions(connection: sqlite3.Connection, limit: int) -> list[tuple[int, str]]:
    """Return dropped attempts whose files may still exist, each with the name of its instance."""
    return connection.execute(
        "SELECT d.attempt, i.name FROM dropped d JOIN attempt a ON a.id = d.attempt"
        " JOIN instance i ON i.id = a.instance WHERE d.bytes IS NULL ORDER BY d.attempt LIMIT ?",
        (limit,),
    ).fetchall()


def record_deleted(connection: sqlite3.Connection, freed: Mapping[int, int]) -> None:
    """Write that the files of attempts are deleted."""
    connection.executemany(
        "UPDATE dropped SET bytes = ? WHERE attempt = ?",
        ((bytes_, attempt) for attempt, bytes_ in freed.items()),
    )


def remove_files(directory: RunDirectory, attempts: Iterable[tuple[int, str]]) -> RemovalResult:
    """Remove the files of dropped attempts. Blocks on the disk."""
    freed: dict[int, int] = {}
    failed: dict[int, str] = {}
    for attempt, name in attempts:
        try:
            freed[attempt] = sum(remove(path) for path in attempt_files(directory, attempt, name))
        except OSError as error:
            failed[attempt] = f"cannot remove `{error.filename}`: {error.strerror}"
    return RemovalResult(freed=freed, failed=failed)
