"""A scope: an exit stack whose closes are bounded, shielded and never change what happened inside.

A close that fails or hangs is noted and counted. One that cannot even be cancelled taints its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

from ..core.errors import let_go

T = TypeVar("T")

CANCEL_SECONDS = 1.0

Note = Callable[[str, str], None]  # kind, message


class Scope:
    """Everything that is kept for an attempt, a worker or a run is entered into one of these."""

    def __init__(self, note: Note, close_seconds: float, outer: Scope | None = None) -> None:
        self._note = note
        self._outer = outer
        self._put_off = False  # a cancellation, until all is closed
        self._close_seconds = close_seconds
        self._entered: list[
            tuple[str, AbstractAsyncContextManager[Any]]
        ] = []  # bound: what `open` is called for
        self.stuck = 0  # closes that are still running, here or in a scope inside this one

    def inner(self) -> Scope:
        """A scope that is closed earlier, by whoever asks for it."""
        return Scope(self._note, self._close_seconds, self)

    async def open(self, name: str, manager: AbstractAsyncContextManager[T]) -> T:
        """Enter `manager`; it is closed when the scope is, in reverse order."""
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
        if self._put_off and self._outer is not None:
            await asyncio.sleep(0)  # what was put off comes here, inside the limit that is around this scope

    async def _close(self, name: str, manager: AbstractAsyncContextManager[Any]) -> None:
        task = asyncio.ensure_future(manager.__aexit__(None, None, None))
        if not await self._settled(task, self._close_seconds):
            task.cancel()
            if not await self._settled(task, CANCEL_SECONDS):
                self._stick()
                abandon(task)
            self._note("close.hung", f"{name}: not closed after {self._close_seconds:g} s")
        elif not task.cancelled() and (error := task.exception()) is not None:
            self._note("close.failed", f"{name}: {type(error).__name__}: {error}")
            let_go(error)

    def _stick(self) -> None:
        self.stuck += 1
        if self._outer is not None:
            self._outer._stick()

    async def _settled(self, task: asyncio.Future[Any], seconds: float) -> bool:
        """Wait for the task, come what may: a cancellation of ours is put off until it is closed."""
        loop = asyncio.get_running_loop()
        owner: asyncio.Task[Any] = asyncio.current_task()  # type: ignore[assignment]
        until = loop.time() + seconds
        put_off = 0
        while not task.done() and (left := until - loop.time()) > 0:
            try:
                await asyncio.wait({task}, timeout=left)
            except asyncio.CancelledError:
                put_off = owner.cancelling()
        if put_off:
            self._put_off = True
            # Once again, as if it came now: the count stays, which a deadline around this scope goes by.
            owner.uncancel()
            loop.call_soon(owner.cancel)
        return task.done()


def abandon(task: asyncio.Task[Any]) -> None:
    """Nobody waits any more for a task that ignores its cancellation, not even the end of its loop."""
    asyncio.tasks._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.add_done_callback(_retrieve)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """It ended late: it has been noted as a hang already."""
    if not task.cancelled():
        task.exception()
