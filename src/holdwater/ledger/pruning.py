"""Shrinks old runs: drops files by a keep rule, compresses logs, removes whole runs.

`estimate_prune` changes nothing, `prune_run` acts under the run's lock. Both touch only run directories and
follow no links. `attempt_files.py` drops files and compresses logs.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from ..core.config import KeepRule
from ..core.errors import BadInput, HoldwaterError, RunLocked
from ..core.policy import keeps
from ..core.records import Record
from .attempt_files import (
    attempt_files,
    attempt_logs,
    compress_log,
    drop_attempts,
    estimate_saving,
    is_regular_file,
    measure_file,
    measure_tree,
    record_deleted,
    remove,
    remove_files,
)
from .blobs import BlobStore, find_references
from .directory import DATABASE_FILES, FOLDERS, RunDirectory
from .exchanges import read_frames
from .reader import PAGE, LedgerReader
from .schema import connect, migrate, to_ledger_error

ReportProgress = Callable[[str], None]
FINISHED = "finished"


class PruneOptions(Record, frozen=True):
    """The actions for each run."""

    keep: KeepRule | None = None  # drop files that this rule does not keep, and unreferenced blobs
    compress: bool = False  # compress logs of settled attempts, and truncate the ledger's write-ahead log
    remove: bool = False  # remove the whole run
    unfinished: bool = False  # include runs that could be resumed
    older_than: float = 0.0  # least seconds since a conductor was last alive


class PruneResult(Record, frozen=True):
    """The result of pruning one run, or the estimate of it."""

    directory: str
    state: str = ""
    seen: float = 0.0  # when a conductor was last alive, in seconds since the epoch
    size: int = 0  # bytes on disk before
    attempts: int = 0  # attempts whose files are removed
    blobs: int = 0
    logs: int = 0  # compressed logs
    bytes: int = 0  # bytes freed in total
    left: str = ""  # why the run is skipped
    problem: str = ""  # the error, if pruning failed


class AttemptFate(Record, frozen=True):
    """An attempt, and whether its files are removed."""

    attempt: int
    name: str
    settled: bool
    dropped: bool
    goes: bool  # the files are to be removed, or may still exist although they were dropped

    @property
    def stays(self) -> bool:
        return not self.goes and not self.dropped


def is_run(path: Path) -> bool:
    """Return whether the path is a run directory and not a link."""
    return not path.is_symlink() and all(is_regular_file(path / name) for name in ("run.json", "ledger.db"))


def list_runs(folder: Path) -> list[Path]:
    """Return the runs directly below a folder."""
    try:
        return sorted(path for path in folder.iterdir() if is_run(path))
    except OSError as error:
        raise BadInput(f"cannot read `{folder}`: {error.strerror}") from error


def estimate_prune(path: Path, wanted: PruneOptions, now: float, tell: ReportProgress) -> PruneResult:
    """Return what `prune_run` would free now."""
    directory = _open_checked(path)
    if holder := directory.find_holder():
        return PruneResult(directory=str(path), left=f"held by process {holder.pid} on {holder.host}")
    with LedgerReader(directory) as reader:
        found = _inspect_run(reader)
        if left := explain_sparing(found, wanted, now):
            return msgspec.structs.replace(found, left=left)
        if wanted.remove:
            return msgspec.structs.replace(found, bytes=found.size)
        return _apply_actions(reader, wanted, found, _EstimatedActions(directory), tell)


def prune_run(path: Path, wanted: PruneOptions, now: float, tell: ReportProgress) -> PruneResult:
    """Prune a run. After a kill the run is consistent, and the next call completes the work."""
    directory = _open_checked(path)
    try:
        with directory.lock():
            return _prune_locked(directory, wanted, now, tell)
    except RunLocked as error:
        return PruneResult(directory=str(path), left=error.message)


def explain_sparing(found: PruneResult, wanted: PruneOptions, now: float) -> str:
    """Return why a run is skipped; empty if it is not."""
    if found.state != FINISHED and not wanted.unfinished:
        return f"{found.state}, it can be resumed"
    if now - found.seen < wanted.older_than:
        return "not old enough"
    return ""


def decide_fate(row: tuple[int, str, bool, str | None, bool, int | None], keep: KeepRule) -> AttemptFate:
    """Decide whether an attempt's files are removed; files of open samples and unsettled attempts stay."""
    attempt, name, settled, outcome, dropped, freed = row
    goes = freed is None if dropped else settled and not keeps(keep, outcome)
    return AttemptFate(
        attempt=attempt, name=name, settled=bool(settled), dropped=bool(dropped), goes=bool(goes)
    )


def _open_checked(path: Path) -> RunDirectory:
    if not is_run(path):
        raise BadInput(f"not a run directory: `{path}`")
    directory = RunDirectory.open(path)
    for place in (*(path / name for name in FOLDERS), *directory.exchanges.glob("*")):
        if place.is_symlink():
            raise HoldwaterError(f"a link is not followed: `{place}`")
    return directory


def _inspect_run(reader: LedgerReader) -> PruneResult:
    rows = reader.rows("SELECT state, seen FROM conductor ORDER BY token DESC LIMIT 1")
    state, seen = rows[0] if rows else (None, reader.config.created)
    path = reader.directory.path
    return PruneResult(directory=str(path), state=state or "unfinished", seen=seen, size=measure_tree(path))


def _prune_locked(
    directory: RunDirectory, wanted: PruneOptions, now: float, tell: ReportProgress
) -> PruneResult:
    with LedgerReader(directory) as reader:
        found = _inspect_run(reader)
    if left := explain_sparing(found, wanted, now):
        return msgspec.structs.replace(found, left=left)
    if wanted.remove:
        _remove_run(directory)
        return msgspec.structs.replace(found, bytes=found.size)
    try:
        with closing(connect(directory.database, "rw")) as connection:
            migrate(connection)
            with LedgerReader(directory) as reader:
                return _apply_actions(reader, wanted, found, _ExecutedActions(directory, connection), tell)
    except sqlite3.Error as error:
        raise to_ledger_error(directory.database, error) from error


def _remove_run(directory: RunDirectory) -> None:
    """Remove a run. The files that identify a run go last, so that an interrupted removal can be repeated."""
    last = [*reversed(DATABASE_FILES), directory.config.name, "lock"]
    for path in sorted(directory.path.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in last:
            path.unlink()
    for name in last:
        (directory.path / name).unlink(missing_ok=True)
    directory.path.rmdir()


def _apply_actions(
    reader: LedgerReader,
    wanted: PruneOptions,
    found: PruneResult,
    hand: _EstimatedActions,
    tell: ReportProgress,
) -> PruneResult:
    """Prune one run: first dropped files, then unreferenced blobs, then the remaining logs."""
    path, keep = reader.directory.path, wanted.keep or KeepRule.ALL
    attempts = blobs = logs = freed = 0
    for page in _page_fates(reader, keep) if wanted.keep is not None else ():
        freed += hand.drop(page, keep)
        attempts += len(page)
        tell(f"{path}: {attempts} attempts")
    for blob in _find_unreferenced(reader, keep, tell) if wanted.keep is not None else ():
        freed += hand.sweep(blob)
        blobs += 1
    for log in _find_logs(reader, keep) if wanted.compress else ():
        saved = hand.compress_log(log)
        freed, logs = freed + saved, logs + bool(saved)
        tell(f"{path}: {logs} logs")
    freed += hand.checkpoint() if wanted.compress else 0
    return msgspec.structs.replace(found, attempts=attempts, blobs=blobs, logs=logs, bytes=freed)


def _read_fates(reader: LedgerReader, keep: KeepRule) -> Iterator[AttemptFate]:
    for row in reader.paged(reader.dropped_clause + _FATES):
        yield decide_fate(row, keep)


def _page_fates(reader: LedgerReader, keep: KeepRule) -> Iterator[list[AttemptFate]]:
    page: list[AttemptFate] = []  # bound: PAGE
    for found in _read_fates(reader, keep):
        if found.goes:
            page.append(found)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def _find_unreferenced(reader: LedgerReader, keep: KeepRule, tell: ReportProgress) -> Iterator[Path]:
    """Yield blobs that no exchange of a kept attempt refers to; on a damaged segment, raise and keep all."""
    directory = reader.directory
    blobs = BlobStore(directory.blobs)
    left = {path.stem for path in blobs.paths()}  # bound: the blobs of one run
    for found in _read_fates(reader, keep):
        if not left:
            return
        for content in read_frames(directory, found.attempt) if found.stays else ():
            left.difference_update(find_references(content))
        tell(f"{directory.path}: collecting media references of attempt {found.attempt}")
    yield from (path for path in blobs.paths() if path.stem in left)


def _find_logs(reader: LedgerReader, keep: KeepRule) -> Iterator[Path]:
    for found in _read_fates(reader, keep):
        if found.stays and found.settled:
            yield from attempt_logs(reader.directory, found.attempt, found.name)


class _EstimatedActions:
    """Estimates the steps of pruning and changes nothing. Each method returns the bytes freed."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def drop(self, page: list[AttemptFate], keep: KeepRule) -> int:
        files = (path for one in page for path in attempt_files(self._directory, one.attempt, one.name))
        return sum(map(measure_file, files))

    def sweep(self, blob: Path) -> int:
        return measure_file(blob)

    def compress_log(self, log: Path) -> int:
        return estimate_saving(log)

    def checkpoint(self) -> int:
        return _measure_wal(self._directory)


class _ExecutedActions(_EstimatedActions):
    """Executes the steps, under the run's lock."""

    def __init__(self, directory: RunDirectory, connection: sqlite3.Connection) -> None:
        super().__init__(directory)
        self._connection = connection
        self._log = _measure_wal(directory)  # measured before this process adds to it

    def drop(self, page: list[AttemptFate], keep: KeepRule) -> int:
        drop_attempts(self._connection, (one.attempt for one in page), keep, time.time())
        removed = remove_files(self._directory, ((one.attempt, one.name) for one in page))
        self._connection.execute("BEGIN IMMEDIATE")
        record_deleted(self._connection, removed.freed)
        self._connection.execute("COMMIT")
        for why in removed.failed.values():
            raise HoldwaterError(why)
        return sum(removed.freed.values())

    def sweep(self, blob: Path) -> int:
        freed = remove(blob)
        for above in (blob.parent, blob.parent.parent):
            if not any(above.iterdir()):
                above.rmdir()
        return freed

    def compress_log(self, log: Path) -> int:
        return compress_log(log)

    def checkpoint(self) -> int:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return max(0, self._log - _measure_wal(self._directory))


def _measure_wal(directory: RunDirectory) -> int:
    """Return the bytes of the ledger's write-ahead log."""
    path = directory.database.with_name(f"{directory.database.name}-wal")
    return measure_file(path)


_FATES = """
    SELECT a.id, i.name, a.settled IS NOT NULL, o.kind, d.attempt IS NOT NULL, d.bytes
    FROM attempt a JOIN instance i ON i.id = a.instance
    LEFT JOIN outcome o ON o.instance = a.instance AND o.sample = a.sample
    LEFT JOIN dropped d ON d.attempt = a.id
    WHERE a.id > ? ORDER BY a.id LIMIT ?
"""
