"""Tasks that several concurrent callers share, and tasks that end although their caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from ...core.image import Note
from ...shielded_wait import end_within

T = TypeVar("T")
CANCEL_SECONDS = 5.0


class _SharedTask(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiters = 0
        self.abandoned = False  # no waiter is left: the task is being cancelled


class SingleFlight(Generic[T]):
    """Shares one task per key. The task runs while it has a waiter.

    The last waiter that is cancelled cancels the task, and waits for its end.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, _SharedTask[T]] = {}  # bound: the waiting callers

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    async def join(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return or raise the result of the work for this key; start the work unless it is running."""
        while (flight := self._running.get(key)) is not None and flight.abandoned:
            await asyncio.wait({flight.task})
        if flight is None:
            flight = self._start(key, work)
        flight.waiters += 1
        try:
            await asyncio.wait({flight.task})
            return flight.task.result()
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                flight.abandoned = True
                flight.task.cancel()
                await asyncio.wait({flight.task})

    def _start(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> _SharedTask[T]:
        flight = self._running[key] = _SharedTask(asyncio.get_running_loop().create_task(work()))

        def end_flight(task: asyncio.Task[T]) -> None:
            del self._running[key]
            if not task.cancelled():
                task.exception()  # mark it as retrieved: without a waiter no caller would retrieve it

        flight.task.add_done_callback(end_flight)
        return flight


async def run_uncancellable(work: Coroutine[Any, Any, None], seconds: float, note: Note, what: str) -> None:
    """Run `work`; report a failure or a timeout with `note`. A cancellation waits until the work ends."""
    task = asyncio.ensure_future(work)
    if (await end_within(task, seconds, CANCEL_SECONDS)).late:
        note("cleanup.failed", f"{what}: not done after {seconds:g} s")
    elif not task.cancelled() and (error := task.exception()) is not None:
        note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")
