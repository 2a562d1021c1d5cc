"""Calls the code of suites and agents: `def` in a thread of its own, `async def` in a task of its own.

It does not use asyncio's default pool: a hung call would keep one of its few threads for ever. A thread
cannot be killed and a task can ignore its cancellation: `UserCalls.alive` counts the calls that still run.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.errors import ResourceExhausted, drop_tracebacks
from .scope import abandon
from .views import is_async

CANCEL_SECONDS = 1.0  # for a cancelled task to end


class UserCalls:
    """The calls of one attempt."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._alive = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        """The number of calls that still run, including abandoned ones."""
        return self._alive

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a plain or `async` function; return its result. Cancelling always ends the wait for it."""
        if is_async(function):
            return await self._run_in_task(function(*arguments, **named))
        result = await self._run_in_thread(partial(function, *arguments, **named))
        return await self._run_in_task(result) if inspect.isawaitable(result) else result

    async def _run_in_task(self, work: Any) -> Any:
        task = asyncio.ensure_future(_guard_work(work))
        self._count(1)
        task.add_done_callback(self._on_task_done)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done():
                raise
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            if not task.done():
                abandon(task)
            raise

    def _on_task_done(self, task: asyncio.Future[Any]) -> None:
        self._count(-1)
        if not task.cancelled():
            task.exception()  # marks it as retrieved; a caller that still waits gets it all the same

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, error: Exception | None) -> None:
            if future.done():
                if error is not None:
                    drop_tracebacks(error)  # the caller is gone, and the error is part of a reference cycle
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def body() -> None:
            result: Any = None
            error: Exception | None = None
            try:
                result = function()
            except BaseException as raised:  # boundary: delivered to the caller  # noqa: BLE001
                error = _make_harmless(raised)
            self._count(-1)
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:  # the loop is closed: no caller waits any more
                return

        self._count(1)
        try:
            threading.Thread(target=body, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._count(-1)
            raise ResourceExhausted(f"cannot start a thread: {error}", kind="threads") from error
        return await future

    def _count(self, change: int) -> None:
        with self._lock:
            self._alive += change


async def _guard_work(work: Any) -> Any:
    """Await `work`. A `sys.exit` or a cancellation that it raises by itself becomes an ordinary error."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as raised:
        if being_cancelled():
            raise
        raise _make_harmless(raised) from raised


def being_cancelled() -> bool:
    """Return whether this task is being cancelled.

    A function of its own: a frame that an error passes through must not hold its own task.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _make_harmless(error: BaseException) -> Exception:
    """Convert an exception of foreign code to one that ends its attempt, not the loop or the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # no future can hold it
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
