"""Run work to its end, within a time limit, although its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...core.image import Note

CANCEL_SECONDS = 5.0


async def run_uncancellable(work: Coroutine[Any, Any, None], seconds: float, note: Note, what: str) -> None:
    """Run `work`; report a failure or a timeout with `note`. A cancellation waits until the work ends."""
    task = asyncio.ensure_future(work)
    put_off = False
    try:
        put_off = await _wait_done(task, seconds)
        if not task.done():
            task.cancel()
            put_off |= await _wait_done(task, CANCEL_SECONDS)
            note("cleanup.failed", f"{what}: not done after {seconds:g} s")
        elif not task.cancelled() and (error := task.exception()) is not None:
            note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")
    finally:
        if put_off and (owner := asyncio.current_task()) is not None:
            # Cancel again, as if the request came now. The cancel count stays the same, as an outer deadline
            # depends on it.
            owner.uncancel()
            asyncio.get_running_loop().call_soon(owner.cancel)


async def _wait_done(task: asyncio.Future[None], seconds: float) -> bool:
    """Wait until the task is done or time is up; return whether a cancellation came meanwhile."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    cancelled = False
    while not task.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
