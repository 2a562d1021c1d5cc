"""Tells a page that its run has changed, as server-sent events; nothing is queued for a slow browser.

The ledger and the segments only grow, so their sizes and times say whether there is something new.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from ..ledger.directory import RunDirectory
from .run_pool import RunPool

LOOK_SECONDS = 1.0
QUIET_LOOKS = 15  # between two comment lines, which find out whether the browser is still there
EVENTS = "text/event-stream"


async def follow_run(pool: RunPool, run: str, request: web.Request) -> web.StreamResponse:
    """Send `changed` after each change, at most once a second, and `over` when the run has ended."""
    directory = RunDirectory(pool.find(run).path)
    response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-store"})
    await response.prepare(request)
    seen = await asyncio.to_thread(_read_state, directory)
    quiet = 0
    while True:
        running = await asyncio.to_thread(directory.find_holder) is not None
        await asyncio.sleep(LOOK_SECONDS)
        state = await asyncio.to_thread(_read_state, directory)
        if state != seen:
            seen, quiet = state, 0
            await response.write(b"event: changed\ndata:\n\n")
        elif not running:
            await response.write(b"event: over\ndata:\n\n")
            return response
        elif (quiet := quiet + 1) % QUIET_LOOKS == 0:
            await response.write(b": quiet\n\n")


def _read_state(directory: RunDirectory) -> tuple[tuple[int, int], ...]:
    database = directory.database
    return tuple(_read_status(path) for path in (database, database.with_name(database.name + "-wal")))


def _read_status(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns
