"""Sends server-sent events to a page; nothing is queued for a slow browser.

A page learns that its run, a transcript or a log has grown: the ledger, segments and logs only grow, so their
sizes and times say so. Long work, such as a search, sends what it finds, and ends with the page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from ..core.errors import HoldwaterError
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import segment_path
from ..ledger.reader import LedgerReader
from ..shielded_wait import wait_shielded
from .file_pages import find_entry
from .page import PageRequest
from .run_pool import read_status

LOOK_SECONDS = 1.0
QUIET_LOOKS = 15  # between two comment lines, which find out whether the browser is still there
EVENTS = "text/event-stream"
SLICE_SECONDS = 0.05  # of work in a thread; between two slices other pages have their turn
MOST_EVENTS = 20  # of a slice


class GrowingFiles(NamedTuple):
    """Files that a page shows, and whether they can still grow."""

    paths: tuple[Path, ...]
    is_running: Callable[[], bool]

    def read_state(self) -> tuple[tuple[int, int], ...]:
        return tuple(read_status(path) for path in self.paths)


def find_growth(asked: PageRequest) -> GrowingFiles:
    """Return the files that a page shows: those of a run, or the transcript or a log of an attempt."""
    directory = RunDirectory(asked.pool.find(asked.run).path)
    if "attempt" not in asked.parts:
        database = directory.database
        log = database.with_name(database.name + "-wal")
        return GrowingFiles((database, log), lambda: directory.find_holder() is not None)
    attempt = asked.read_part("attempt")
    path = find_entry(asked) if asked.query.get("name") else segment_path(directory, attempt)

    def is_running() -> bool:
        if directory.find_holder() is None:
            return False
        try:
            with LedgerReader(directory) as reader:
                row = reader.attempt(attempt)
        except (HoldwaterError, OSError):  # it has vanished
            return False
        return row is not None and row.settled is None

    return GrowingFiles((path,), is_running)


async def follow_changes(files: GrowingFiles, request: web.Request) -> web.StreamResponse:
    """Send `changed` after each change, at most once a second, and `over` when there will be no more."""
    response = web.StreamResponse(headers={"Content-Type": EVENTS, "Cache-Control": "no-store"})
    await response.prepare(request)
    seen = await asyncio.to_thread(files.read_state)
    quiet = 0
    while True:
        running = await asyncio.to_thread(files.is_running)
        await asyncio.sleep(LOOK_SECONDS)
        state = await asyncio.to_thread(files.read_state)
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
