"""Sends server-sent events to a page; nothing is queued for a slow browser.

A page learns that its run has changed: the ledger and the segments only grow, so their sizes and times say
so. Long work, such as a search, sends what it finds, and ends with the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from concurrent.futures import Executor
from typing import NamedTuple

from aiohttp import web

from ..core.errors import HoldwaterError
from ..ledger.directory import RunDirectory
from ..shielded_wait import wait_shielded
from .run_pool import RunPool, read_state

LOOK_SECONDS = 1.0
QUIET_LOOKS = 15  # between two comment lines, which find out whether the browser is still there
EVENTS = "text/event-stream"
SLICE_SECONDS = 0.05  # of work in a thread; between two slices other pages have their turn
MOST_EVENTS = 20  # of a slice


async def follow_run(pool: RunPool, run: str, request: web.Request) -> web.StreamResponse:
    """Send `changed` after each change, at most once a second, and `over` when the run has ended."""
    directory = RunDirectory(pool.find(run).path)
    response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-store"})
    await response.prepare(request)
    seen = await asyncio.to_thread(read_state, directory)
    quiet = 0
    while True:
        running = await asyncio.to_thread(directory.find_holder) is not None
        await asyncio.sleep(LOOK_SECONDS)
        state = await asyncio.to_thread(read_state, directory)
        if state != seen:
            seen, quiet = state, 0
            await response.write(b"event: changed\ndata:\n\n")
        elif not running:
            await response.write(b"event: over\ndata:\n\n")
            return response
        elif (quiet := quiet + 1) % QUIET_LOOKS == 0:
            await response.write(b": quiet\n\n")


class PageEvent(NamedTuple):
    """An event for a page: text, or HTML that a template has rendered."""

    name: str
    data: str = ""


PageWork = Generator[PageEvent | None, None, None]


async def send_work(work: PageWork, request: web.Request, threads: Executor) -> web.StreamResponse:
    """Send the events of some work, and `over` after its last one; close the work when the page has gone.

    The work is done in slices: it stops when no further one is begun. None is a step without an event.
    """
    response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-store"})
    loop = asyncio.get_running_loop()
    try:
        await response.prepare(request)
        over = False
        while not over:
            slice_ = loop.run_in_executor(threads, _do_slice, work)
            if await wait_shielded(slice_):
                raise asyncio.CancelledError
            content, over = slice_.result()
            await response.write(content)
    finally:
        work.close()
    return response


def _do_slice(work: PageWork) -> tuple[bytes, bool]:
    """Return the events of a slice, and whether the work is over."""
    until = time.monotonic() + SLICE_SECONDS
    events: list[PageEvent] = []
    over = False
    while len(events) < MOST_EVENTS and time.monotonic() < until and not over:
        try:
            event = next(work)
        except StopIteration:
            event, over = PageEvent("over"), True
        except HoldwaterError as error:
            events.append(PageEvent("problem", str(error)))
            event, over = PageEvent("over"), True
        if event is not None:
            events.append(event)
    return b"".join(map(_encode_event, events)) or b": busy\n\n", over


def _encode_event(event: PageEvent) -> bytes:
    lines = "".join(f"data: {line}\n" for line in event.data.splitlines() or [""])
    return f"event: {event.name}\n{lines}\n".encode(errors="replace")
