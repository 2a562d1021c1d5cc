"""Work that is done to its end although whoever asked for it was cancelled; bounded in seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...core.image import Note

CANCEL_SECONDS = 5.0


async def sheltered(work: Coroutine[Any, Any, None], seconds: float, note: Note, what: str) -> None:
    """Do it; a failure or a hang is noted. A cancellation is put off until it is done."""
    task = asyncio.ensure_future(work)
    put_off = False
    try:
        put_off = await _settled(task, seconds)
        if not task.done():
            task.cancel()
            put_off |= await _settled(task, CANCEL_SECONDS)
            note("cleanup.failed", f"{what}: not done after {seconds:g} s")
        elif not task.cancelled() and (error := task.exception()) is not None:
            note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")
    finally:
        if put_off and (owner := asyncio.current_task()) is not None:
            # Once again, as if it came now: the count stays, which a deadline around this goes by.
            owner.uncancel()
            asyncio.get_running_loop().call_soon(owner.cancel)


async def _settled(task: asyncio.Future[None], seconds: float) -> bool:
    """Wait until the task is done or time is up; whether a cancellation came meanwhile."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    cancelled = False
    while not task.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
