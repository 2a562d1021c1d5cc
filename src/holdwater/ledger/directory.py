"""The run directory: its layout, its creation, its lock and `run.json`, and how a run is found by name.

This module never opens the database: `ledger.py` writes it and `reader.py` reads it.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ..core.config import RunConfig
from ..core.errors import BadInput, RunLocked
from ..core.records import Record
from .durable_files import (
    DIRECTORY_MODE,
    FILE_MODE,
    NEW_SUFFIX,
    NO_SPACE_ERRORS,
    cannot_write,
    make_directory,
    replace_file,
    sync_directory,
    write_all,
)

RUNS = Path("runs")
LATEST = "latest"
FOLDERS = ("exchanges", "blobs", "artifacts", "logs", "scratch", "reserve")
DATABASE_FILES = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-journal")
SELECTION = "select.txt"
REPLACED_FILES = ("lock", "run.json", SELECTION)  # written under another name first
SKELETON = {
    *FOLDERS,
    *DATABASE_FILES,
    *("lock", SELECTION, "run.log"),
    *(name + NEW_SUFFIX for name in REPLACED_FILES),
}
LOCK_PATIENCE = 0.5  # seconds: a reader that looks up the lock's holder takes the lock for an instant


def find_run(name: str | None) -> Path:
    """Return the run's directory; `latest` or None selects the newest run in `runs/`."""
    if name and name != LATEST:
        return Path(name)
    runs = [(config.stat().st_mtime, config.parent) for config in RUNS.glob("*/run.json")]
    if not runs:
        hint = "name a run's directory, or make a run: `holdwater run demo`"
        raise BadInput(f"no run in `{RUNS.absolute()}`", hint=hint)
    return max(runs)[1]


class LockHolder(Record, frozen=True):
    """The process that holds the lock of a run directory."""

    pid: int
    host: str
    since: float


class DirectoryIdentity(Record, frozen=True):
    """The directory that a run's name on this machine belongs to: a copy has another inode."""

    run: str
    device: int
    inode: int


class RunDirectory:
    """The paths of a run directory, and its lock."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "run.json"
        self.selection = self.path / SELECTION  # the instances that `--select` chose
        self.database = self.path / "ledger.db"
        self.exchanges = self.path / "exchanges"
        self.blobs = self.path / "blobs"
        self.artifacts = self.path / "artifacts"
        self.logs = self.path / "logs"
        self.scratch = self.path / "scratch"
        self.reserve = self.path / "reserve"
        self.token = self.path / "token"  # of the server, while it serves
        self._lock = self.path / "lock"
        self._identity = self.path / "identity.json"

    @classmethod
    def create(cls, path: Path | str) -> RunDirectory:
        """Create a directory, or reset one whose creation was interrupted. `write_config` completes it."""
        directory = cls(path)
        directory._check_is_free()
        try:
            directory.path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            directory.make_private()
        except OSError as e:
            if e.errno in NO_SPACE_ERRORS:
                raise cannot_write(directory.path, e) from e
            raise BadInput(
                f"cannot make the run's directory: `{directory.path}`: {e.strerror}",
                hint="choose a writable directory with `--out`",
            ) from e
        with directory.lock():
            directory._check_is_free()
            directory._reset()
        return directory

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """Open a directory that holds a run."""
        directory = cls(path)
        if directory.config.is_file():
            return directory
        if not directory.path.is_dir():
            raise BadInput(f"no such directory: `{path}`")
        if directory._is_remains():
            raise BadInput(
                f"the run was never created, its start was cut short: `{path}`",
                hint=f"run the same `holdwater run --out {path}` again",
            )
        raise BadInput(f"not a run directory, it has no `run.json`: `{path}`")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the directory. The lock ends with the process; its child processes do not inherit it."""
        fd = self._take_lock()
        try:
            yield
        finally:
            os.close(fd)

    def find_holder(self) -> LockHolder | None:
        """Return the current holder of the lock; None if the lock is free."""
        for _ in range(100):
            try:
                fd = os.open(self._lock, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                if _try_lock(fd, fcntl.LOCK_SH):
                    return None
                content = os.read(fd, 4096)
            finally:
                os.close(fd)
            if content:
                return _holders.decode(content)
            time.sleep(0.01)  # a new directory is locked, and its lock file is still empty
        return LockHolder(pid=0, host="an unknown host", since=self._lock.stat().st_mtime)

    def write_config(self, config: RunConfig) -> None:
        """Complete the creation: from now on the directory holds a run."""
        if self.config.exists():
            raise self._existing_run_error()
        self.replace_config(config)

    def replace_config(self, config: RunConfig) -> None:
        """Replace the configuration of the run. The caller holds the lock."""
        replace_file(
            self.config, msgspec.json.format(msgspec.json.encode(_dump_fields(config)), indent=2) + b"\n"
        )

    def read_config(self) -> RunConfig:
        try:
            return _configs.decode(self.config.read_bytes())
        except OSError as e:
            raise BadInput(f"cannot read `{self.config}`: {e.strerror}") from e
        except msgspec.MsgspecError as e:  # the message names the field
            raise BadInput(f"`{self.config}` is not a run's configuration: {e}") from e

    def identify(self, run: str) -> str:
        """Return the name of this directory's run on this machine. The caller holds the lock.

        Processes, sandboxes, containers and locks carry this name. It is the run's id, and a new id in a copy
        of the directory, so that neither run touches resources of the other.
        """
        place = self.path.stat()
        try:
            known = _identities.decode(self._identity.read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError):
            known = None
        except OSError as e:
            raise BadInput(f"cannot read `{self._identity}`: {e.strerror}") from e
        if known is not None and (known.device, known.inode) == (place.st_dev, place.st_ino):
            return known.run
        name = run if known is None else secrets.token_hex(8)
        found = DirectoryIdentity(run=name, device=place.st_dev, inode=place.st_ino)
        replace_file(self._identity, msgspec.json.encode(found) + b"\n")
        return name

    def sandbox_root(self, config: RunConfig) -> Path:
        """Return the directory for the files of this run's sandboxes; no other run uses it."""
        return Path(config.scratch or self.scratch) / f"holdwater-{config.id}"

    # Creation.

    def _check_is_free(self) -> None:
        if self.config.exists():
            raise self._existing_run_error()
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"not a directory: `{self.path}`")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._is_remains():
            raise BadInput(
                f"the directory is not empty and holds no run: `{self.path}`", hint="give another `--out`"
            )

    def _is_remains(self) -> bool:
        """Return whether the directory is the result of an interrupted creation.

        It then has a lock, only names that a creation makes, and empty folders.
        """
        if not self._lock.is_file() or self.config.exists():
            return False
        for entry in self.path.iterdir():
            if entry.name not in SKELETON:
                return False
            if entry.name in FOLDERS and not (entry.is_dir() and not any(entry.iterdir())):
                return False
        return True

    def make_private(self) -> None:
        """Make an existing directory inaccessible to others; raise if it belongs to another user."""
        found = self.path.stat()
        if found.st_uid != os.geteuid():
            raise BadInput(
                f"the directory belongs to {name_user(found.st_uid)}: `{self.path}`",
                hint="give another `--out`",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            self.path.chmod(DIRECTORY_MODE)

    def _reset(self) -> None:
        try:
            for name in (*DATABASE_FILES, SELECTION, self.config.name + NEW_SUFFIX):
                (self.path / name).unlink(missing_ok=True)
            for name in FOLDERS:
                make_directory(self.path / name)
            sync_directory(self.path)
            sync_directory(self.path.absolute().parent)
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def _existing_run_error(self) -> BadInput:
        return BadInput(
            f"the directory holds a run already: `{self.path}`",
            hint=f"`holdwater resume {self.path}` continues it",
        )

    # The lock. After locking, the lock file is replaced by a complete file that is already locked, so that a
    # reader never sees a partial holder. A process that locked the replaced file detects that and retries.

    def _take_lock(self) -> int:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            fd = self._open_lock()
            try:
                if _try_lock(fd, fcntl.LOCK_EX) and self._is_current(fd):
                    return self._write_holder()
            finally:
                os.close(fd)
            if time.monotonic() > until:
                raise self._lock_error()
            time.sleep(0.01)

    def _open_lock(self) -> int:
        try:
            return os.open(self._lock, os.O_RDWR | os.O_CREAT, FILE_MODE)
        except FileNotFoundError as e:
            raise BadInput(f"no such directory: `{self.path}`") from e
        except OSError as e:
            raise cannot_write(self._lock, e) from e

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._lock.stat())
        except FileNotFoundError:
            return False

    def _write_holder(self) -> int:
        """Replace the held lock file by a locked file that names this process; return its descriptor."""
        new = self._lock.with_name(self._lock.name + NEW_SUFFIX)
        me = LockHolder(pid=os.getpid(), host=socket.gethostname(), since=time.time())
        fd = -1
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE_MODE)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, msgspec.json.encode(me))
            new.replace(self._lock)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            raise cannot_write(self._lock, e) from e
        return fd

    def _lock_error(self) -> RunLocked:
        holder = self.find_holder()
        if holder is None:
            return RunLocked(f"the lock of the run was busy: `{self.path}`", hint="try again")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        return RunLocked(
            f"the run is held by process {holder.pid} on {holder.host} since {since}: `{self.path}`",
            hint="wait for it, or end that process",
        )


def name_user(uid: int) -> str:
    """Return the name of a user of this machine, for messages."""
    try:
        return f"user `{pwd.getpwuid(uid).pw_name}`"
    except KeyError:
        return f"user {uid}"


def _dump_fields(record: Record) -> dict[str, Any]:
    """Return every field, also defaults: a later version with other defaults must not change the run."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return {name: _dump_fields(value) if isinstance(value, Record) else value for name, value in fields}


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Created at import: msgspec crashes if two threads use a type for the first time concurrently.
_holders = msgspec.json.Decoder(LockHolder)
_configs = msgspec.json.Decoder(RunConfig)
_identities = msgspec.json.Decoder(DirectoryIdentity)
