"""A disposable file beside a run that tells which parts of its transcripts may contain a text.

It stands in the run directory, or in a cache directory if that may not be written, and deleting it loses
nothing. It holds no text: an FTS5 index of trigrams for each chunk of a segment, and the place of the chunk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..core.errors import BadInput, HoldwaterError
from .directory import RunDirectory
from .durable_files import make_directory, open_private
from .search import SearchPattern

NAME = "search.db"
VERSION = 1  # of tables and contents: an index of another version is built anew
APPLICATION = 0x68577331
CHUNK = 256 * 1024  # characters of text in a chunk
BATCH = 4 << 20  # characters in a transaction
PATIENCE = 5.0  # seconds that another process may hold the file
TABLES = """
    CREATE TABLE about (run TEXT NOT NULL);
    CREATE TABLE chunk (
        id INTEGER PRIMARY KEY,
        attempt INTEGER NOT NULL,
        start INTEGER NOT NULL,       -- bytes of the segment
        stop INTEGER NOT NULL,
        indexed INTEGER NOT NULL,     -- 0: too large to be parsed; a search reads it
        UNIQUE (attempt, start)
    );
    CREATE VIRTUAL TABLE texts USING fts5(
        text, content='', columnsize=0, detail=none, tokenize='trigram'
    );
"""


class IndexUnusable(HoldwaterError):
    """The index is damaged, of another version, or of another run."""


class SearchIndex:
    """An open index, used with `with`. A method that finds it damaged raises `IndexUnusable`."""

    def __init__(self, path: Path, run: str, mode: str = "ro") -> None:
        """Open the index of a run; `mode` is an SQLite open mode: `ro` or `rw`."""
        self.path = path
        self._pending = 0  # characters since the last commit
        if mode == "ro" and not os.access(path.parent, os.W_OK):
            mode = "ro&immutable=1"  # SQLite cannot create the files that it shares with a writer
        try:
            self._connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=PATIENCE,
                check_same_thread=False,
            )
        except sqlite3.Error as error:
            raise self._explain(error) from None
        try:
            self._check(run)
        except BaseException:  # boundary: close the connection, then raise again
            self.close()
            raise

    def __enter__(self) -> SearchIndex:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Keep the chunks so far and close the file."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("COMMIT")
        except sqlite3.Error:
            pass  # the chunks since the last commit are indexed again
        finally:
            self._connection.close()

    def verify(self) -> None:
        """Raise `IndexUnusable` if the file is damaged anywhere. It reads the whole file."""
        if self._rows("PRAGMA quick_check(1)") != [("ok",)]:
            raise IndexUnusable("its file is damaged")

    # Searching.

    def select(self, pattern: SearchPattern) -> bool:
        """Select the chunks that may contain the text; False if the text is too short for that."""
        grams = pattern.list_grams()
        if not grams:
            return False
        words = " AND ".join('"' + gram.replace('"', '""') + '"' for gram in grams)
        self._rows("DROP TABLE IF EXISTS temp.candidate")
        self._rows(
            "CREATE TEMP TABLE candidate AS SELECT attempt, start, stop FROM chunk"
            " WHERE NOT indexed OR id IN (SELECT rowid FROM texts WHERE texts MATCH ?)",
            (words,),
        )
        self._rows("CREATE INDEX temp.candidate_attempt ON candidate (attempt, start)")
        return True

    def list_ranges(self, attempt: int, size: int) -> list[tuple[int, int]]:
        """Return the parts of a segment of `size` bytes that a search must read."""
        ranges: list[tuple[int, int]] = self._rows(
            "SELECT start, stop FROM candidate WHERE attempt = ? ORDER BY start", (attempt,)
        )
        covered = self.find_end(attempt)
        if covered > size:
            raise IndexUnusable(f"the exchanges of attempt {attempt} have changed since")
        return [*ranges, (covered, size)] if covered < size else ranges

    # Building.

    def find_end(self, attempt: int) -> int:
        """Return the byte of the attempt's segment up to which it is in the index."""
        return int(self._rows("SELECT coalesce(max(stop), 0) FROM chunk WHERE attempt = ?", (attempt,))[0][0])

    def add(self, attempt: int, place: tuple[int, int], texts: Iterable[str] | None) -> None:
        """Add a chunk; without its texts, every search reads it."""
        if not self._connection.in_transaction:
            self._rows("BEGIN IMMEDIATE")
        row = self._rows(
            "INSERT INTO chunk (attempt, start, stop, indexed) VALUES (?, ?, ?, ?) RETURNING id",
            (attempt, *place, texts is not None),
        )[0][0]
        if texts is not None:
            text = "\n".join(texts).replace("\0", " ").encode(errors="replace").decode()
            self._rows("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row, text))
            self._pending += len(text)
        if self._pending >= BATCH:
            self._rows("COMMIT")
            self._pending = 0

    def measure(self) -> int:
        """Return the bytes of segments in the index."""
        return int(self._rows("SELECT coalesce(sum(stop - start), 0) FROM chunk")[0][0])

    def _check(self, run: str) -> None:
        versions = tuple(self._rows(f"PRAGMA {name}")[0][0] for name in ("application_id", "user_version"))
        if versions != (APPLICATION, VERSION):
            raise IndexUnusable("it was built by another version of holdwater")
        if self._rows("SELECT run FROM about") != [(run,)]:
            raise IndexUnusable("it belongs to another run")

    def _rows(self, query: str, arguments: tuple[object, ...] = ()) -> list[Any]:
        try:
            return self._connection.execute(query, arguments).fetchall()
        except sqlite3.Error as error:
            raise self._explain(error) from None

    def _explain(self, error: sqlite3.Error) -> HoldwaterError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return BadInput(f"another process builds the index: `{self.path}`", "try again when it is done")
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            return BadInput(f"cannot write the index: `{self.path}`: {error}")
        return IndexUnusable(f"its file is damaged: {error}")


def find_index(directory: RunDirectory, cache: Path) -> Path | None:
    """Return the file of the index of a run, if it has one."""
    return next((path for path in _list_places(directory, cache) if path.exists()), None)


def open_index(directory: RunDirectory, cache: Path, run: str) -> tuple[SearchIndex, str]:
    """Open the index of a run for building; create it if there is none, or an unusable one.

    The text says why an existing index was not used.
    """
    path, reason = _list_places(directory, cache)[0], ""
    if path.exists():
        try:
            index = SearchIndex(path, run, "rw")
            try:
                index.verify()
            except BaseException:  # boundary: close the file, then raise again
                index.close()
                raise
            return index, ""
        except IndexUnusable as unusable:
            reason = unusable.message
    _create(path, run)
    return SearchIndex(path, run, "rw"), reason


def remove_index(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _create(path: Path, run: str) -> None:
    try:
        remove_index(path)
        make_directory(path.parent)
        os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        connection = sqlite3.connect(path, isolation_level=None, timeout=PATIENCE)
    except OSError as error:
        raise BadInput(f"cannot write the index: `{path}`: {error.strerror}") from None
    try:
        connection.execute("PRAGMA journal_mode = WAL")  # a search reads while the index grows
        connection.executescript(TABLES)
        connection.execute("INSERT INTO about VALUES (?)", (run,))
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {VERSION}")
    except sqlite3.Error as error:
        raise BadInput(f"cannot write the index: `{path}`: {error}") from None
    finally:
        connection.close()


def _list_places(directory: RunDirectory, cache: Path) -> list[Path]:
    """Return the places of an index; the first is where it is built.

    A directory whose mode forbids writing is not written, not even by root.
    """
    place = directory.path
    name = blake3(os.fsencode(place.resolve())).hexdigest()[:32]
    places = [place / NAME, cache / "search" / f"{name}.db"]
    writable = os.access(place, os.W_OK) and place.stat().st_mode & 0o200
    return places if writable else places[::-1]
