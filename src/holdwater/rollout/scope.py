"""A scope: an exit stack whose closes are bounded, shielded, and never change the result of the block.

A close that fails or hangs is recorded as an event. A close that cannot even be cancelled taints its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

from ..core.errors import drop_tracebacks
from ..shielded_wait import end_within

T = TypeVar("T")

CANCEL_SECONDS = 1.0

Note = Callable[[str, str], None]  # kind, message


class Scope:
    """Closes the resources of an attempt, a worker or a run; each resource is opened in one."""

    def __init__(self, note: Note, close_seconds: float, outer: Scope | None = None) -> None:
        self._note = note
        self._outer = outer
        self._cancel_deferred = False  # a cancellation waits until everything is closed
        self._close_seconds = close_seconds
        self._entered: list[tuple[str, AbstractAsyncContextManager[Any]]] = []  # bound: the calls of `open`
        self.stuck = 0  # closes that still run, of this scope or of a scope inside it

    def inner(self) -> Scope:
        """Return a scope inside this one, which the caller closes earlier."""
        return Scope(self._note, self._close_seconds, self)

    async def open(self, name: str, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter `manager` and return its value; closing the scope closes it, in reverse order."""
        value = await manager.__aenter__()
        self._entered.append((name, manager))
        return value

    async def __aenter__(self) -> Scope:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._entered:
            await self._close(*self._entered.pop())
        if self._cancel_deferred and self._outer is not None:
            await asyncio.sleep(0)  # a deferred cancellation arrives here, inside the limit around the scope

    async def _close(self, name: str, manager: AbstractAsyncContextManager[Any]) -> None:
        task = asyncio.ensure_future(manager.__aexit__(None, None, None))
        end = await end_within(task, self._close_seconds, CANCEL_SECONDS)
        self._cancel_deferred |= end.deferred
        if end.late:
            if not task.done():
                self._count_stuck()
                abandon(task)
            self._note("close.hung", f"{name}: not closed after {self._close_seconds:g} s")
        elif not task.cancelled() and (error := task.exception()) is not None:
            self._note("close.failed", f"{name}: {type(error).__name__}: {error}")
            drop_tracebacks(error)

    def _count_stuck(self) -> None:
        self.stuck += 1
        if self._outer is not None:
            self._outer._count_stuck()


def abandon(task: asyncio.Task[Any]) -> None:
    """Stop tracking a task that ignores its cancellation: even the end of its loop does not wait for it."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task that ended late: it has been recorded as hung already."""
    if not task.cancelled():
        task.exception()
