"""Waits for work that must end although its caller is cancelled meanwhile, or that several callers share.

All rooms may use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
CANCEL_SECONDS = 5.0


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


async def run_uncancellable(
    work: Coroutine[Any, Any, None], seconds: float, note: Callable[[str, str], None], what: str
) -> None:
    """Run `work`; report a failure or a timeout with `note`. A cancellation waits until the work ends."""
    task = asyncio.ensure_future(work)
    if (await end_within(task, seconds, CANCEL_SECONDS)).late:
        note("cleanup.failed", f"{what}: not done after {seconds:g} s")
    elif not task.cancelled() and (error := task.exception()) is not None:
        note("cleanup.failed", f"{what}: {type(error).__name__}: {error}")
