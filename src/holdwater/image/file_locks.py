"""File locks among all processes of a machine. The kernel frees a lock when its process dies."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

# Seconds between two attempts to get a lock: an unlock raises no event, and a thread that waits in the kernel
# could not be cancelled.
POLL_SECONDS = 0.02


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
        await asyncio.sleep(POLL_SECONDS)
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
