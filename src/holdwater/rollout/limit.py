"""The time that a phase of an attempt may take. What is done when it is over is in `attempt.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ..core.errors import LimitReached
from ..core.records import Phase


@asynccontextmanager
async def limit(allowed: Callable[[], float], phase: Phase) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, but what is allowed may grow while it runs."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    handle: asyncio.TimerHandle
    try:
        async with asyncio.timeout(None) as timeout:

            def check() -> None:
                nonlocal handle
                due = start + allowed()
                if loop.time() >= due:
                    timeout.reschedule(loop.time())
                else:
                    handle = loop.call_at(due, check)

            handle = loop.call_at(start + allowed(), check)
            try:
                yield
            finally:
                handle.cancel()
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise LimitReached(f"{phase} took longer than {allowed():g} s") from error
