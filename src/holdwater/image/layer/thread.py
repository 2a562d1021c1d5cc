"""Run blocking work in a separate thread, which ends soon after its caller is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# The work calls it between its pieces; it raises `WorkAbandoned` once the caller is cancelled.
CancelCheck = Callable[[], None]
T = TypeVar("T")


class WorkAbandoned(Exception):
    """The caller of this work was cancelled."""


async def run_in_thread(work: Callable[[CancelCheck], T]) -> T:
    """Return the result of `work`. A cancellation ends the work at its next `check`, and waits for that."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise WorkAbandoned

    with ThreadPoolExecutor(1, "layer") as thread:
        future = asyncio.get_running_loop().run_in_executor(thread, work, check)
        try:
            return await asyncio.shield(future)
        finally:
            stop.set()
            await _wait_ended(future)


async def run_to_end(work: Callable[[], T]) -> T:
    """Run work that finishes in spite of a cancellation, such as a clean-up; return its result."""
    return await run_in_thread(lambda check: work())


async def _wait_ended(future: asyncio.Future[T]) -> None:
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # the first cancellation is already being raised
    future.exception()  # mark it as retrieved: a cancelled caller does not retrieve it
