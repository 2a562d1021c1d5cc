"""Private and durable files: creation for this user only, atomic replacement, and syncing of directories.

It knows no file formats: frames are in `segment.py`, content by hash in `blobs.py`. A run directory is 0700,
so that other users reach nothing in it; its files are 0600 as well, in case the directory's mode is relaxed
later by hand.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ..core.errors import DiskFull, LedgerFailed, RunFailed

DIRECTORY_MODE = 0o700  # independent of the umask
FILE_MODE = 0o600
NEW_SUFFIX = ".new"  # of a file that is being written
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT)


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
