"""Defines the tables of a ledger as numbered migrations, and opens connections.

Never edit a migration that has shipped: append another. `statements.py` writes the rows.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec

from ..core.errors import BadInput, DiskFull, LedgerCorrupt, LedgerFailed
from .durable_files import cannot_write, open_private
from .instance_tags import list_stored_tags
from .record_encoding import unpack
from .resume_state import decode_verdict
from .rows import SettledFigures

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE conductor (          -- one row each time a conductor opens the run
        token INTEGER PRIMARY KEY,    -- fences the earlier ones
        started REAL NOT NULL,
        seen REAL NOT NULL,           -- when it was last known to be alive
        ended REAL,
        state TEXT,
        reason TEXT,
        exit_status INTEGER
    );
    CREATE TABLE instance (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,
        digest BLOB NOT NULL,
        payload BLOB NOT NULL,        -- packed, see record_encoding.py
        place TEXT NOT NULL,
        planned INTEGER NOT NULL,     -- the conductor that planned it
        sighted INTEGER NOT NULL      -- the pass over the suite that last saw it, see resume_state.py
    );
    CREATE TABLE attempt (
        id INTEGER PRIMARY KEY,
        instance INTEGER NOT NULL REFERENCES instance (id),
        sample INTEGER NOT NULL,
        number INTEGER NOT NULL,
        round INTEGER NOT NULL,
        scale INTEGER NOT NULL,
        alone INTEGER NOT NULL,
        regrades INTEGER REFERENCES attempt (id),
        token INTEGER NOT NULL REFERENCES conductor (token),
        started REAL NOT NULL,
        settled REAL,                 -- NULL until its verdict is committed
        kind TEXT,                    -- `passed`, `failed` or the place of an unscored failure
        place TEXT,                   -- where it failed, if it did
        failure TEXT,                 -- the failure's kind
        passed INTEGER,
        score REAL,
        exchanges INTEGER,
        verdict BLOB,                 -- packed
        UNIQUE (instance, sample, number)
    );
    CREATE INDEX attempt_unsettled ON attempt (id) WHERE settled IS NULL;
    CREATE TABLE outcome (
        instance INTEGER NOT NULL REFERENCES instance (id),
        sample INTEGER NOT NULL,
        attempt INTEGER NOT NULL REFERENCES attempt (id),
        kind TEXT NOT NULL,
        score REAL,
        place TEXT,
        closed REAL NOT NULL,
        PRIMARY KEY (instance, sample)
    ) WITHOUT ROWID;
    CREATE TABLE tally (key TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
    CREATE TABLE event (
        id INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        token INTEGER NOT NULL,
        kind TEXT NOT NULL,
        message TEXT NOT NULL,
        attempt INTEGER
    );
    CREATE TABLE timeline (id INTEGER PRIMARY KEY, gauge BLOB NOT NULL);
    """,
    """
    CREATE TABLE dropped (            -- attempts whose files are not kept; written before the files go
        attempt INTEGER PRIMARY KEY REFERENCES attempt (id),
        at REAL NOT NULL,
        keep TEXT NOT NULL,           -- the `--keep` that says so
        bytes INTEGER                 -- what that freed; NULL until all of them are gone
    );
    CREATE INDEX dropped_going ON dropped (attempt) WHERE bytes IS NULL;
    """,
    """
    CREATE TABLE orders (             -- what clients of a server asked for
        id INTEGER PRIMARY KEY,
        key TEXT NOT NULL UNIQUE,     -- the client's: the same key is the same order
        asked BLOB NOT NULL,          -- packed
        at REAL NOT NULL,
        instance INTEGER NOT NULL REFERENCES instance (id),
        delivered REAL                -- when a client had its result
    );
    CREATE TABLE rollout (            -- the samples that are ordered
        instance INTEGER NOT NULL REFERENCES instance (id),
        sample INTEGER NOT NULL,
        orders INTEGER NOT NULL REFERENCES orders (id),
        member INTEGER NOT NULL,
        PRIMARY KEY (instance, sample)
    ) WITHOUT ROWID;
    CREATE INDEX rollout_orders ON rollout (orders, member);
    """,
    """
    CREATE TABLE reopened (           -- samples that had an outcome and are tried again
        instance INTEGER NOT NULL REFERENCES instance (id),
        sample INTEGER NOT NULL,
        number INTEGER NOT NULL,      -- attempts that it had had: retries count anew from here
        round INTEGER NOT NULL,       -- in which it goes on: rounds count anew from here
        at REAL NOT NULL,
        PRIMARY KEY (instance, sample, number)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE regrade (            -- each time that kept work is graded again
        id INTEGER PRIMARY KEY,
        grader TEXT NOT NULL,
        patterns TEXT NOT NULL,       -- JSON: of instance ids; none: all of them
        started REAL NOT NULL,
        ended REAL,                   -- NULL: it goes on when the run is resumed
        switched INTEGER              -- 1: its grades became outcomes; 0: it was given up
    );
    CREATE TABLE regraded (           -- a sample of a regrade that is graded, or cannot be
        regrade INTEGER NOT NULL REFERENCES regrade (id),
        instance INTEGER NOT NULL REFERENCES instance (id),
        sample INTEGER NOT NULL,
        attempt INTEGER REFERENCES attempt (id),  -- NULL: the outcome stays
        kind TEXT,
        score REAL,
        place TEXT,
        refused TEXT,                 -- why the outcome stays
        PRIMARY KEY (regrade, instance, sample)
    ) WITHOUT ROWID;
    ALTER TABLE conductor ADD COLUMN regrade INTEGER;  -- that it conducted; NULL: it ran agents
    """,
    """
    ALTER TABLE orders ADD COLUMN owner TEXT NOT NULL DEFAULT '';  -- whose key it came with; empty: no one's
    """,
    """
    ALTER TABLE attempt ADD COLUMN input_tokens INTEGER;   -- figures of the verdict, see `SettledFigures`
    ALTER TABLE attempt ADD COLUMN output_tokens INTEGER;
    ALTER TABLE attempt ADD COLUMN nanodollars INTEGER;
    ALTER TABLE attempt ADD COLUMN seconds REAL;
    ALTER TABLE attempt ADD COLUMN peak_memory INTEGER;
    ALTER TABLE attempt ADD COLUMN message TEXT;
    UPDATE attempt SET input_tokens = verdict_figure(verdict, 0), output_tokens = verdict_figure(verdict, 1),
        nanodollars = verdict_figure(verdict, 2), seconds = verdict_figure(verdict, 3),
        peak_memory = verdict_figure(verdict, 4), message = verdict_figure(verdict, 5)
    WHERE verdict IS NOT NULL;
    """,
    """
    ALTER TABLE attempt ADD COLUMN answer TEXT;   -- its beginning, as JSON
    ALTER TABLE attempt ADD COLUMN version TEXT;  -- of the policy that answered the last call
    CREATE TABLE tag (                -- the tags of instances, see `instance_tags.py`
        tag TEXT NOT NULL,
        instance INTEGER NOT NULL REFERENCES instance (id),
        PRIMARY KEY (tag, instance)
    ) WITHOUT ROWID;
    UPDATE attempt SET answer = verdict_figure(verdict, 6), version = verdict_figure(verdict, 7)
    WHERE verdict IS NOT NULL;
    INSERT INTO tag SELECT each.value, instance.id FROM instance, json_each(instance_tags(payload)) AS each;
    """,
)
FIGURES_VERSION = 7  # of a ledger whose attempts have the first columns of `SettledFigures`
ANSWER_VERSION = 8  # of a ledger that has answers, versions of the policy, and tags
BUSY_TIMEOUT = 10.0  # seconds that a writer waits for another process, for example for its checkpoint


def create_database(path: Path) -> None:
    """Create an empty ledger."""
    if path.exists():
        raise BadInput(f"the ledger already exists: `{path}`")
    try:  # SQLite creates its other files with the same mode
        os.close(open_private(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except OSError as e:
        raise cannot_write(path, e) from e
    connection = connect(path, "rw")
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(connection)
    except sqlite3.Error as e:
        raise to_ledger_error(path, e) from e
    finally:
        connection.close()


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open a connection with the ledger's settings; `mode` is an SQLite open mode: `rwc`, `rw` or `ro`."""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_TIMEOUT,
            check_same_thread=False,
        )
    except sqlite3.Error as e:
        raise to_ledger_error(path, e) from e
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
    except sqlite3.Error as e:
        connection.close()
        raise to_ledger_error(path, e) from e
    return connection


def migrate(connection: sqlite3.Connection, migrations: tuple[str, ...] = MIGRATIONS) -> None:
    """Apply the missing migrations, each in one transaction; a new ledger has all of them in one."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    check_version(version, len(migrations))
    connection.create_function("verdict_figure", 2, _read_figure, deterministic=True)
    connection.create_function("instance_tags", 1, _dump_tags, deterministic=True)
    scripts = [
        f"{migration}; PRAGMA user_version = {number};"
        for number, migration in enumerate(migrations[version:], version + 1)
    ]
    for script in scripts if version else ["".join(scripts)]:
        try:
            connection.executescript(f"BEGIN IMMEDIATE; {script} COMMIT;")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.rollback()
            raise


def _read_figure(verdict: bytes, place: int) -> float | str | None:
    """Return one of the `SettledFigures` of a packed verdict; None if it is damaged."""
    try:
        return SettledFigures.of(decode_verdict(verdict))[place]
    except Exception:  # boundary: damaged bytes can make the decoders raise anything  # noqa: BLE001
        return None


def _dump_tags(payload: bytes) -> str:
    """Return the tags of a packed instance as JSON; none if it is damaged."""
    try:
        return msgspec.json.encode(list_stored_tags(unpack(payload))).decode()
    except Exception:  # boundary: damaged bytes can make the decoders raise anything  # noqa: BLE001
        return "[]"


def check_version(version: int, known: int = len(MIGRATIONS)) -> None:
    if version > known:
        raise BadInput(
            f"the run was written by a newer holdwater: ledger version {version}, supported up to {known}",
            hint="upgrade holdwater",
        )


def to_ledger_error(path: Path, error: sqlite3.Error) -> LedgerFailed | LedgerCorrupt:
    """Convert an SQLite error to an error of the ledger."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return LedgerCorrupt(f"the ledger is damaged: `{path}`: {error}", hint="restore the file from a copy")
    message = f"cannot write the ledger: `{path}`: {error}"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):  # an exceeded quota is reported as IOERR
        return DiskFull(message, hint="make space, then `holdwater resume` the run")
    return LedgerFailed(message)
