"""Private and durable files: creation for this user only, atomic replacement, syncing of directories, locks.

It knows no file formats: frames are in `segment.py`, content by hash in `blobs.py`. A run directory is 0700,
so that other users reach nothing in it; its files are 0600 as well, in case the directory's mode is relaxed
later by hand. Exported files are replaced atomically, but are not private. A lock holds among all processes
of a machine; the kernel frees it when its process dies.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ..core.errors import DiskFull, HoldwaterError, LedgerFailed, RunFailed

DIRECTORY_MODE = 0o700  # independent of the umask
FILE_MODE = 0o600
NEW_SUFFIX = ".new"  # of a file that is being written
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# Seconds between two attempts to get a lock: an unlock raises no event, and a thread that waits in the kernel
# could not be cancelled.
LOCK_POLL_SECONDS = 0.02


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open` and `FileIO` that creates files readable by this user only."""
    return os.open(path, flags, FILE_MODE)


def write_private(path: Path, content: bytes) -> None:
    """Write `content` to `path` as `path.write_bytes` does, readable by this user only."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)


def replace_file(path: Path, content: bytes) -> None:
    """Replace `path` atomically: readers, also after a crash, find the complete old or new content."""
    new = path.with_name(path.name + NEW_SUFFIX)
    try:
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        try:
            write_all(fd, content)
            os.fsync(fd)
        finally:
            os.close(fd)
        new.replace(path)
        sync_directory(path.parent)
    except OSError as e:
        raise cannot_write(path, e) from e


def write_all(fd: int, content: bytes) -> None:
    """Write all of `content`; continue after a short write."""
    written = os.write(fd, content)
    if written == len(content):
        return
    view = memoryview(content)
    while written < len(content):
        written += os.write(fd, view[written:])


def sync_directory(path: Path) -> None:
    """Make the entries of a directory survive power loss."""
    sync_path(path, os.O_RDONLY | os.O_DIRECTORY)


def sync_path(path: Path, flags: int = os.O_RDONLY) -> None:
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cannot_write(path: Path, error: OSError) -> LedgerFailed:
    message = f"cannot write `{path}`: {os.strerror(error.errno or errno.EIO)}"
    if error.errno in NO_SPACE_ERRORS:
        return DiskFull(message, "make space, then `holdwater resume` the run")
    return LedgerFailed(message)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether a write failed because one of the run's own disks is full."""
    if isinstance(error, RunFailed):
        return error.kind == "disk"
    return isinstance(error, DiskFull) or (isinstance(error, OSError) and error.errno in NO_SPACE_ERRORS)


@contextmanager
def open_atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block succeeds, and is removed otherwise."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with new.open("wb") as file:
                yield file
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a document as readable JSON."""
    with open_atomic_file(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


@contextmanager
def open_atomic_directory(path: Path) -> Iterator[Path]:
    """Create a directory that replaces `path` if the block succeeds, and is removed otherwise."""
    new, old = (path.with_name(f".{path.name}.{what}") for what in ("new", "old"))
    try:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)
        new.mkdir(parents=True)
        yield new
        if path.exists():
            path.rename(old)
        new.rename(path)
    except OSError as error:
        raise HoldwaterError(f"cannot write `{path}`: {error.strerror}") from None
    finally:
        for left in (new, old):
            shutil.rmtree(left, ignore_errors=True)


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Try to lock an open file; return whether the lock is held now."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(path: Path, *, shared: bool = False) -> int | None:
    """Return a descriptor that holds the lock of a file until it is closed; None: another process holds it.

    The file is created if it is missing.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        if not try_lock(fd, shared=shared):
            os.close(fd)
            return None
        try:
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)  # its last holder removed the file between open and lock


async def wait_lock(path: Path, seconds: float = math.inf, *, shared: bool = False) -> int | None:
    """Return a descriptor as `lock_file` does; None if the lock was not free in time."""
    until = time.monotonic() + seconds
    while (fd := lock_file(path, shared=shared)) is None and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(LOCK_POLL_SECONDS)
    return fd


@asynccontextmanager
async def hold_lock(path: Path, seconds: float = math.inf, *, shared: bool = False) -> AsyncIterator[bool]:
    """Hold the lock of a file; yield whether it was acquired in time."""
    fd = await wait_lock(path, seconds, shared=shared)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


@contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock of a file if no other process holds it; yield whether it was free."""
    fd = lock_file(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)
