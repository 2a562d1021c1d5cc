"""Makes old runs smaller: drops files that are not to be kept, compresses logs, removes whole runs.

`foresee` says what would go and changes nothing, `carry_out` does it under the run's lock. Neither touches
anything but run directories, and neither follows a link. How a run drops files while it runs is in
`retention.py`, what a compressed log is in `squeeze.py`.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Protocol

import msgspec

from ..core.config import Keep
from ..core.errors import BadInput, HoldwaterError, RunLocked
from ..core.policy import keeps
from ..core.records import Record
from . import retention
from .blobs import Blobs
from .directory import DATABASE_FILES, FOLDERS, RunDirectory
from .exchanges import read_frames
from .files import attempt_files, attempt_logs, is_plain, remove, taken, taken_below
from .media import references
from .reader import PAGE, Reader
from .schema import connect, failed, migrate
from .squeeze import squeeze, squeezed_saving

Tell = Callable[[str], None]
FINISHED = "finished"


class Wanted(Record, frozen=True):
    """What is to be done with each run."""

    keep: Keep | None = None  # drop what this does not keep, and blobs that nothing kept refers to
    compress: bool = False  # logs of settled attempts, and the ledger's write-ahead log
    remove: bool = False  # the whole run
    unfinished: bool = False  # also what could be resumed
    older_than: float = 0.0  # seconds since a conductor was at work on it


class Pruned(Record, frozen=True):
    """What goes of one run, or has gone."""

    directory: str
    state: str = ""
    seen: float = 0.0  # when a conductor was last at work on it, in seconds since the epoch
    size: int = 0  # bytes on disk before
    attempts: int = 0  # whose files go
    blobs: int = 0
    logs: int = 0  # that are compressed
    bytes: int = 0  # that all of it frees
    left: str = ""  # why it is left alone
    problem: str = ""  # what went wrong


class Fate(Record, frozen=True):
    """An attempt, and what becomes of its files."""

    attempt: int
    name: str
    settled: bool
    dropped: bool
    goes: bool  # they are to be removed, or may be there although they were dropped

    @property
    def stays(self) -> bool:
        return not self.goes and not self.dropped


def is_run(path: Path) -> bool:
    """Whether this is a run's directory, and no link to one."""
    return not path.is_symlink() and all(is_plain(path / name) for name in ("run.json", "ledger.db"))


def runs_in(folder: Path) -> list[Path]:
    """The runs directly below a folder."""
    try:
        return sorted(path for path in folder.iterdir() if is_run(path))
    except OSError as error:
        raise BadInput(f"cannot read `{folder}`: {error.strerror}") from error


def foresee(path: Path, wanted: Wanted, now: float, tell: Tell) -> Pruned:
    """What `carry_out` would do now."""
    directory = _checked(path)
    if holder := directory.holder():
        return Pruned(directory=str(path), left=f"held by process {holder.pid} on {holder.host}")
    with Reader(directory) as reader:
        found = _look(reader)
        if left := spared(found, wanted, now):
            return msgspec.structs.replace(found, left=left)
        if wanted.remove:
            return msgspec.structs.replace(found, bytes=found.size)
        return _pass(reader, wanted, found, _Foreseeing(directory), tell)


def carry_out(path: Path, wanted: Wanted, now: float, tell: Tell) -> Pruned:
    """Do it. What a kill on the way leaves is whole, and the rest is done by the next one."""
    directory = _checked(path)
    try:
        with directory.lock():
            return _carry_out(directory, wanted, now, tell)
    except RunLocked as error:
        return Pruned(directory=str(path), left=error.message)


def spared(found: Pruned, wanted: Wanted, now: float) -> str:
    """Why a run is left alone; empty if it is not."""
    if found.state != FINISHED and not wanted.unfinished:
        return f"{found.state}, it can be resumed"
    if now - found.seen < wanted.older_than:
        return "not old enough"
    return ""


def fate(row: tuple[int, str, bool, str | None, bool, int | None], keep: Keep) -> Fate:
    """What becomes of an attempt's files: those of an open sample, or of an attempt without verdict, stay."""
    attempt, name, settled, outcome, dropped, freed = row
    goes = freed is None if dropped else settled and not keeps(keep, outcome)
    return Fate(attempt=attempt, name=name, settled=bool(settled), dropped=bool(dropped), goes=bool(goes))


def _checked(path: Path) -> RunDirectory:
    if not is_run(path):
        raise BadInput(f"not a run directory: `{path}`")
    directory = RunDirectory.open(path)
    for place in (*(path / name for name in FOLDERS), *directory.exchanges.glob("*")):
        if place.is_symlink():
            raise HoldwaterError(f"a link is not followed: `{place}`")
    return directory


def _look(reader: Reader) -> Pruned:
    rows = reader.rows("SELECT state, seen FROM conductor ORDER BY token DESC LIMIT 1")
    state, seen = rows[0] if rows else (None, reader.config.created)
    path = reader.directory.path
    return Pruned(directory=str(path), state=state or "unfinished", seen=seen, size=taken_below(path))


def _carry_out(directory: RunDirectory, wanted: Wanted, now: float, tell: Tell) -> Pruned:
    with Reader(directory) as reader:
        found = _look(reader)
    if left := spared(found, wanted, now):
        return msgspec.structs.replace(found, left=left)
    if wanted.remove:
        _remove_run(directory)
        return msgspec.structs.replace(found, bytes=found.size)
    try:
        with closing(connect(directory.database, "rw")) as connection:
            migrate(connection)
            with Reader(directory) as reader:
                return _pass(reader, wanted, found, _Doing(directory, connection), tell)
    except sqlite3.Error as error:
        raise failed(directory.database, error) from error


def _remove_run(directory: RunDirectory) -> None:
    """What makes it a run goes last: until then it can be removed again."""
    last = [*reversed(DATABASE_FILES), directory.config.name, "lock"]
    for path in sorted(directory.path.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in last:
            path.unlink()
    for name in last:
        (directory.path / name).unlink(missing_ok=True)
    directory.path.rmdir()


class _Hand(Protocol):
    """Does what is asked for, or only says what it would free. All numbers are bytes."""

    def drop(self, page: list[Fate], keep: Keep) -> int: ...

    def sweep(self, blob: Path) -> int: ...

    def squeeze(self, log: Path) -> int: ...

    def checkpoint(self) -> int: ...


def _pass(reader: Reader, wanted: Wanted, found: Pruned, hand: _Hand, tell: Tell) -> Pruned:
    """One go over a run: what is not kept, then blobs that nothing refers to, then the logs that stay."""
    path, keep = reader.directory.path, wanted.keep or Keep.ALL
    attempts = blobs = logs = freed = 0
    for page in _pages(reader, keep) if wanted.keep is not None else ():
        freed += hand.drop(page, keep)
        attempts += len(page)
        tell(f"{path}: {attempts} attempts")
    for blob in _unreferenced(reader, keep, tell) if wanted.keep is not None else ():
        freed += hand.sweep(blob)
        blobs += 1
    for log in _logs(reader, keep) if wanted.compress else ():
        saved = hand.squeeze(log)
        freed, logs = freed + saved, logs + bool(saved)
        tell(f"{path}: {logs} logs")
    freed += hand.checkpoint() if wanted.compress else 0
    return msgspec.structs.replace(found, attempts=attempts, blobs=blobs, logs=logs, bytes=freed)


def _fates(reader: Reader, keep: Keep) -> Iterator[Fate]:
    after = 0
    while page := reader.rows(reader.with_dropped + _FATES, (after, PAGE)):
        yield from (fate(row, keep) for row in page)
        after = page[-1][0]


def _pages(reader: Reader, keep: Keep) -> Iterator[list[Fate]]:
    page: list[Fate] = []  # bound: PAGE
    for found in _fates(reader, keep):
        if found.goes:
            page.append(found)
        if len(page) == PAGE:
            yield page
            page = []
    if page:
        yield page


def _unreferenced(reader: Reader, keep: Keep, tell: Tell) -> Iterator[Path]:
    """The blobs that no exchange of an attempt that stays refers to. A damaged segment keeps them all."""
    directory = reader.directory
    blobs = Blobs(directory.blobs)
    left = {path.stem for path in blobs.paths()}  # bound: the blobs of one run
    for found in _fates(reader, keep):
        if not left:
            return
        for content in read_frames(directory, found.attempt) if found.stays else ():
            left.difference_update(references(content))
        tell(f"{directory.path}: looking for what media attempt {found.attempt} refers to")
    yield from (path for path in blobs.paths() if path.stem in left)


def _logs(reader: Reader, keep: Keep) -> Iterator[Path]:
    for found in _fates(reader, keep):
        if found.stays and found.settled:
            yield from attempt_logs(reader.directory, found.attempt, found.name)


class _Foreseeing:
    """Measures."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def drop(self, page: list[Fate], keep: Keep) -> int:
        files = (path for one in page for path in attempt_files(self._directory, one.attempt, one.name))
        return sum(map(taken, files))

    def sweep(self, blob: Path) -> int:
        return taken(blob)

    def squeeze(self, log: Path) -> int:
        return squeezed_saving(log)

    def checkpoint(self) -> int:
        return _log_size(self._directory)


class _Doing:
    """Does it, under the run's lock."""

    def __init__(self, directory: RunDirectory, connection: sqlite3.Connection) -> None:
        self._directory = directory
        self._connection = connection
        self._log = _log_size(directory)  # before we add to it

    def drop(self, page: list[Fate], keep: Keep) -> int:
        retention.drop(self._connection, (one.attempt for one in page), keep, time.time())
        removed = retention.remove_files(self._directory, ((one.attempt, one.name) for one in page))
        self._connection.execute("BEGIN IMMEDIATE")
        retention.gone(self._connection, removed.freed)
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

    def squeeze(self, log: Path) -> int:
        return squeeze(log)

    def checkpoint(self) -> int:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return max(0, self._log - _log_size(self._directory))


def _log_size(directory: RunDirectory) -> int:
    """The bytes of the ledger's write-ahead log."""
    path = directory.database.with_name(f"{directory.database.name}-wal")
    return taken(path)


_FATES = """
    SELECT a.id, i.name, a.settled IS NOT NULL, o.kind, d.attempt IS NOT NULL, d.bytes
    FROM attempt a JOIN instance i ON i.id = a.instance
    LEFT JOIN outcome o ON o.instance = a.instance AND o.sample = a.sample
    LEFT JOIN dropped d ON d.attempt = a.id
    WHERE a.id > ? ORDER BY a.id LIMIT ?
"""
