"""The run directory: its layout, its creation, its lock and `run.json`.

What is in the ledger is `ledger.py`'s; this module never looks into the database.
"""

from __future__ import annotations

import errno
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
from .disk import NEW, cannot_write, replace_file, sync_directory, write_all
from .private import DIRECTORY, FILE, make_directory

FOLDERS = ("exchanges", "blobs", "artifacts", "logs", "scratch", "reserve")
DATABASE_FILES = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-journal")
SKELETON = {*FOLDERS, *DATABASE_FILES, "lock", "lock" + NEW, "run.json" + NEW, "run.log"}
LOCK_PATIENCE = 0.5  # seconds: a reader that asks who holds the lock has it for an instant


class Holder(Record, frozen=True):
    """Who holds a run directory."""

    pid: int
    host: str
    since: float


class Identity(Record, frozen=True):
    """Which directory a run's name on this machine belongs to: a copy has another inode."""

    run: str
    device: int
    inode: int


class RunDirectory:
    """A run's place on disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config = self.path / "run.json"
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
        """A new directory, or the remains of a killed creation, reset. `write_config` completes it."""
        directory = cls(path)
        directory._check_is_free()
        try:
            directory.path.mkdir(mode=DIRECTORY, parents=True, exist_ok=True)
            directory.make_private()
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise cannot_write(directory.path, e) from e
            raise BadInput(
                f"cannot make the run's directory: `{directory.path}`: {e.strerror}",
                hint="name a directory that can be written with `--out`",
            ) from e
        with directory.lock():
            directory._check_is_free()
            directory._reset()
        return directory

    @classmethod
    def open(cls, path: Path | str) -> RunDirectory:
        """A directory that holds a run."""
        directory = cls(path)
        if directory.config.is_file():
            return directory
        if not directory.path.is_dir():
            raise BadInput(f"no such directory: `{path}`")
        if directory._is_remains():
            raise BadInput(
                f"the run was never created, its start was cut short: `{path}`",
                hint=f"type the same `holdwater run --out {path}` again",
            )
        raise BadInput(f"not a run directory, it has no `run.json`: `{path}`")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory. The lock dies with the process and is not passed on to programs it starts."""
        fd = self._take_lock()
        try:
            yield
        finally:
            os.close(fd)

    def holder(self) -> Holder | None:
        """Who holds the lock now; None when nobody does."""
        for _ in range(100):
            try:
                fd = os.open(self._lock, os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                if _acquire(fd, fcntl.LOCK_SH):
                    return None
                content = os.read(fd, 4096)
            finally:
                os.close(fd)
            if content:
                return _holders.decode(content)
            time.sleep(0.01)  # caught between the first lock of a new directory and its first content
        return Holder(pid=0, host="an unknown host", since=self._lock.stat().st_mtime)

    def write_config(self, config: RunConfig) -> None:
        """The last step of creation: from here on the directory holds a run."""
        if self.config.exists():
            raise self._holds_a_run()
        self.replace_config(config)

    def replace_config(self, config: RunConfig) -> None:
        """Put another configuration in the place of the run's own; hold the lock around that."""
        replace_file(self.config, msgspec.json.format(msgspec.json.encode(_whole(config)), indent=2) + b"\n")

    def read_config(self) -> RunConfig:
        try:
            return _configs.decode(self.config.read_bytes())
        except OSError as e:
            raise BadInput(f"cannot read `{self.config}`: {e.strerror}") from e
        except msgspec.MsgspecError as e:  # the message names the field
            raise BadInput(f"`{self.config}` is not a run's configuration: {e}") from e

    def identify(self, run: str) -> str:
        """The name by which the machine knows this directory's run; with the lock held.

        Processes, sandboxes, containers and locks carry it. It is the run's id, and a fresh one in a copy of
        the directory: so neither ever touches what belongs to the other.
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
        found = Identity(run=name, device=place.st_dev, inode=place.st_ino)
        replace_file(self._identity, msgspec.json.encode(found) + b"\n")
        return name

    def sandboxes(self, config: RunConfig) -> Path:
        """Where the sandboxes of this run keep their files: a directory that is this run's alone."""
        return Path(config.scratch or self.scratch) / f"holdwater-{config.id}"

    # Creation.

    def _check_is_free(self) -> None:
        if self.config.exists():
            raise self._holds_a_run()
        if self.path.exists() and not self.path.is_dir():
            raise BadInput(f"not a directory: `{self.path}`")
        if self.path.is_dir() and any(self.path.iterdir()) and not self._is_remains():
            raise BadInput(
                f"the directory is not empty and holds no run: `{self.path}`", hint="give another `--out`"
            )

    def _is_remains(self) -> bool:
        """Our lock and our names, with nothing in the folders: what a killed creation leaves."""
        if not self._lock.is_file() or self.config.exists():
            return False
        for entry in self.path.iterdir():
            if entry.name not in SKELETON:
                return False
            if entry.name in FOLDERS and not (entry.is_dir() and not any(entry.iterdir())):
                return False
        return True

    def make_private(self) -> None:
        """Close a directory that was there already to others; one that belongs to another user is refused."""
        found = self.path.stat()
        if found.st_uid != os.geteuid():
            raise BadInput(
                f"the directory belongs to {name_user(found.st_uid)}: `{self.path}`",
                hint="give another `--out`",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            self.path.chmod(DIRECTORY)

    def _reset(self) -> None:
        try:
            for name in (*DATABASE_FILES, self.config.name + NEW):
                (self.path / name).unlink(missing_ok=True)
            for name in FOLDERS:
                make_directory(self.path / name)
            sync_directory(self.path)
            sync_directory(self.path.absolute().parent)
        except OSError as e:
            raise cannot_write(self.path, e) from e

    def _holds_a_run(self) -> BadInput:
        return BadInput(
            f"the directory holds a run already: `{self.path}`",
            hint=f"`holdwater resume {self.path}` continues it",
        )

    # The lock. The file that is locked is replaced by one that is locked already and whole, so that a reader
    # never sees half a holder; whoever locked the file that was replaced finds out and starts over.

    def _take_lock(self) -> int:
        until = time.monotonic() + LOCK_PATIENCE
        while True:
            fd = self._open_lock()
            try:
                if _acquire(fd, fcntl.LOCK_EX) and self._is_current(fd):
                    return self._sign()
            finally:
                os.close(fd)
            if time.monotonic() > until:
                raise self._locked()
            time.sleep(0.01)

    def _open_lock(self) -> int:
        try:
            return os.open(self._lock, os.O_RDWR | os.O_CREAT, FILE)
        except FileNotFoundError as e:
            raise BadInput(f"no such directory: `{self.path}`") from e
        except OSError as e:
            raise cannot_write(self._lock, e) from e

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._lock.stat())
        except FileNotFoundError:
            return False

    def _sign(self) -> int:
        """Put a locked file that names this process in the place of the lock that is held."""
        new = self._lock.with_name(self._lock.name + NEW)
        me = Holder(pid=os.getpid(), host=socket.gethostname(), since=time.time())
        fd = -1
        try:
            fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, FILE)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_all(fd, msgspec.json.encode(me))
            new.replace(self._lock)
        except OSError as e:
            if fd >= 0:
                os.close(fd)
            raise cannot_write(self._lock, e) from e
        return fd

    def _locked(self) -> RunLocked:
        holder = self.holder()
        if holder is None:
            return RunLocked(f"the lock of the run was busy: `{self.path}`", hint="try again")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
        return RunLocked(
            f"the run is held by process {holder.pid} on {holder.host} since {since}: `{self.path}`",
            hint="wait for it, or end that process",
        )


def name_user(uid: int) -> str:
    """How messages name a user of this machine."""
    try:
        return f"user `{pwd.getpwuid(uid).pw_name}`"
    except KeyError:
        return f"user {uid}"


def _whole(record: Record) -> dict[str, Any]:
    """Every field, defaults too: a later version with other defaults must not change what was asked for."""
    fields = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return {name: _whole(value) if isinstance(value, Record) else value for name, value in fields}


def _acquire(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# Made at import: msgspec crashes when two threads meet a type for the first time at once.
_holders = msgspec.json.Decoder(Holder)
_configs = msgspec.json.Decoder(RunConfig)
_identities = msgspec.json.Decoder(Identity)
