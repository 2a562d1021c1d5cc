"""Calls into the code of suites and agents: a thread of its own for `def`, a task of its own for `async def`.

Never asyncio's default pool: a hung call would keep one of its few threads for ever. A thread cannot be
killed and a task can refuse to be cancelled: `Calls.alive` says how many outlived their attempt.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.errors import ResourceExhausted, let_go
from .scope import abandon
from .views import is_async

CANCEL_SECONDS = 1.0  # what a cancelled task gets to end


class Calls:
    """The calls of one attempt."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._alive = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        """How many are still running, given up on or not."""
        return self._alive

    async def call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The result of a plain or `async` function. A cancellation ends the waiting, whatever it calls."""
        if is_async(function):
            return await self._in_task(function(*arguments, **named))
        result = await self._in_thread(partial(function, *arguments, **named))
        return await self._in_task(result) if inspect.isawaitable(result) else result

    async def _in_task(self, work: Any) -> Any:
        task = asyncio.ensure_future(_guarded(work))
        self._count(1)
        task.add_done_callback(self._ended)
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

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self._count(-1)
        if not task.cancelled():
            task.exception()  # seen: whoever still waits for it gets it, and nobody else wants to

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, error: Exception | None) -> None:
            if future.done():
                if error is not None:
                    let_go(error)  # nobody waits for it any more, and it is held by what it holds
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
                error = _harmless(raised)
            self._count(-1)
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        self._count(1)
        try:
            threading.Thread(target=body, name=self._name, daemon=True).start()
        except RuntimeError as error:
            self._count(-1)
            raise ResourceExhausted(f"no thread could be started for it: {error}", kind="threads") from error
        return await future

    def _count(self, change: int) -> None:
        with self._lock:
            self._alive += change


async def _guarded(work: Any) -> Any:
    """`work`, of which a `sys.exit` or a cancellation of its own making is an error like any other."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as raised:
        if being_cancelled():
            raise
        raise _harmless(raised) from raised


def being_cancelled() -> bool:
    """Whether this task is. Asked here: a frame that an error goes through must not know its own task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _harmless(error: BaseException) -> Exception:
    """What foreign code raised, as an error that ends its attempt and neither the loop nor the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):  # no future carries that one
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
