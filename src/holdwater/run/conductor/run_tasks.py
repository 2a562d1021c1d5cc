"""The tasks that a scheduler starts, and the inbox in which it finds the reports of the run's other parts.

A fleet reports to the inbox and never calls the scheduler, so that each can be complete when it is made.
`PendingNotes` holds the notes of a run's helpers until there is a ledger. A signal before the scheduler runs
cancels the conductor's task (`signals.py` receives it): that becomes the end `interrupted`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from ...core.errors import RunInterrupted
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ...rollout.worker_protocol import EventNoted, LineLogged
from ..fleet.interface import FleetUpdate
from .signals import CommandSignals

MOST_NOTES = 1000  # notes waiting to be written; beyond it the oldest are dropped
NOTE_SECONDS = 1.0


class RunInbox:
    """The reports that the scheduler has not handled yet, in their order. Lines are logged at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._updates: deque[FleetUpdate] = deque()  # bound: the reports of one turn of the loop
        self._closed = False

    def put(self, update: FleetUpdate) -> None:
        """Add a report. After the run's end, recovery finds it in the journals instead."""
        if isinstance(update, LineLogged):
            self.say(update.line)
        elif not self._closed:
            self._updates.append(update)
            self._arrived.set()

    def note(self, kind: str, message: str) -> None:
        """Add an event to be recorded; from any thread."""
        self._loop.call_soon_threadsafe(self.put, EventNoted(kind=kind, message=message))

    async def wait(self) -> None:
        """Wait until there are reports."""
        await self._arrived.wait()

    def take(self) -> list[FleetUpdate]:
        """Return all reports so far."""
        updates = list(self._updates)
        self._updates.clear()
        self._arrived.clear()
        return updates

    def close(self) -> None:
        """Take no more reports."""
        self._closed = True


class RunTasks:
    """The tasks of one run: all are in one group, and some are cancelled at the end of the run."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        # Bound: the run's concurrency, the periodic tasks, and one pull.
        self._cancellable: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> RunTasks:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._group.__aexit__(kind, error, trace)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run a coroutine that ends before the run does; after an error, the journals take its place."""
        try:
            return self._group.create_task(work)
        except RuntimeError:  # the group is closing
            work.close()
            return None

    def spawn_cancellable(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that the end of the run cancels."""
        task = self.spawn(work)
        if task is not None:
            self._cancellable.add(task)
            task.add_done_callback(self._cancellable.discard)

    def cancel(self) -> None:
        """Cancel the tasks that are to be cancelled at the end of the run."""
        for task in tuple(self._cancellable):
            task.cancel()


class PendingNotes:
    """Accepts a note at any time: call it with a kind and a message."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[str, str]] = deque(maxlen=MOST_NOTES)

    def __call__(self, kind: str, message: str) -> None:
        self._waiting.append((kind, message))

    async def write(self, ledger: Ledger) -> None:
        while self._waiting:
            await ledger.note(*self._waiting.popleft())

    def periodic_task(self, ledger: Ledger) -> PeriodicTask:
        return PeriodicTask("notes", NOTE_SECONDS, lambda: self.write(ledger))


@contextmanager
def convert_cancellation(signals: CommandSignals) -> Iterator[None]:
    """Turn the cancellation by an early signal into the end `interrupted`."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.count:
            raise
        current_task().uncancel()
        raise make_interruption() from None


def make_interruption() -> RunInterrupted:
    return RunInterrupted("interrupted", "`holdwater resume` continues the run")


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
