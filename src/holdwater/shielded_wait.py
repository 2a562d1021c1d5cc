"""Waits for work that must end although its caller is cancelled meanwhile. All rooms may use it."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple


class TaskEnd(NamedTuple):
    """How a bounded wait ended."""

    late: bool  # the task was cancelled because its time was up; it may still run if it ignores that
    deferred: bool  # a cancellation of the caller came meanwhile, and comes again now


async def end_within(task: asyncio.Future[Any], seconds: float, cancel_seconds: float) -> TaskEnd:
    """Wait for the task; after `seconds` cancel it and wait for `cancel_seconds` more.

    A cancellation of the caller is put off until then.
    """
    deferred = await wait_shielded(task, seconds)
    late = not task.done()
    if late:
        task.cancel()
        deferred |= await wait_shielded(task, cancel_seconds)
    owner = asyncio.current_task()
    if deferred and owner is not None:
        # Cancel again, as if the request came now. The count stays the same: a timeout around needs it.
        owner.uncancel()
        asyncio.get_running_loop().call_soon(owner.cancel)
    return TaskEnd(late, deferred)


async def wait_shielded(task: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait until the task is done or the time is up.

    Return whether a cancellation of the caller came meanwhile: the caller has to raise it.
    """
    loop = asyncio.get_running_loop()
    until = None if seconds is None else loop.time() + seconds
    cancelled = False
    while not task.done():
        left = None if until is None else until - loop.time()
        if left is not None and left <= 0:
            break
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
