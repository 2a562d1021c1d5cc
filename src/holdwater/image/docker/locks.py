"""Locks among all processes of a machine, on files. They end with whoever holds them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

TICK = 0.02  # seconds between two looks at a lock
PATIENCE = 120.0  # seconds for another janitor's work


@asynccontextmanager
async def held(path: Path, seconds: float, *, shared: bool = False) -> AsyncIterator[bool]:
    """Hold the lock of this file, among all processes of the machine. Whether it was given in time."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + seconds
    try:
        while not (given := locked(fd, shared=shared)) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(TICK)  # no event tells of another process
        yield given
    finally:
        os.close(fd)


@asynccontextmanager
async def alone(path: Path) -> AsyncIterator[None]:
    """The same for one that nothing goes without."""
    async with held(path, PATIENCE) as given:
        if not given:
            raise TimeoutError(f"another janitor has been at work for {PATIENCE:g} s")
        yield


def locked(fd: int, *, shared: bool = False) -> bool:
    """Whether the lock of an open file was free, and is held now."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
