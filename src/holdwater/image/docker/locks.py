"""File locks among all processes of a machine. The kernel frees a lock when its process dies."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

POLL_SECONDS = 0.02  # seconds between two attempts to get a lock
LOCK_SECONDS = 120.0  # time limit to wait for another janitor


@asynccontextmanager
async def hold_lock(path: Path, seconds: float, *, shared: bool = False) -> AsyncIterator[bool]:
    """Hold the lock of a file among all processes of the machine; yield whether it was acquired in time."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + seconds
    try:
        while not (given := try_lock(fd, shared=shared)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)  # another process's unlock raises no event
        yield given
    finally:
        os.close(fd)


@asynccontextmanager
async def hold_exclusive(path: Path) -> AsyncIterator[None]:
    """Hold the lock exclusively; raise TimeoutError if it is not acquired in time."""
    async with hold_lock(path, LOCK_SECONDS) as given:
        if not given:
            raise TimeoutError(f"another janitor has held the lock for {LOCK_SECONDS:g} s")
        yield


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Try to lock an open file; return whether the lock is held now."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
