"""A thread of its own for every blocking call of a suite or an agent.

Never asyncio's default pool: a hung call would keep one of its few threads for ever. A thread cannot be
killed: `Threads.alive` says how many outlived their attempt, and the worker is replaced for it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from .views import is_async


class Threads:
    """The threads of one attempt."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._alive = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> int:
        """How many calls are still running, given up on or not."""
        return self._alive

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a plain or `async` function; a plain one runs in a thread of its own."""
        if is_async(function):
            return await function(*arguments)
        result = await self._in_thread(function, *arguments)
        return await result if inspect.isawaitable(result) else result

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def body() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = function(*arguments)
            except StopIteration as raised:  # a future cannot carry it
                error = RuntimeError(f"StopIteration: {raised}")
            except BaseException as raised:  # boundary: delivered to the caller  # noqa: BLE001
                error = raised
            with self._lock:
                self._alive -= 1
            try:
                loop.call_soon_threadsafe(deliver, result, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return

        with self._lock:
            self._alive += 1
        threading.Thread(target=body, name=self._name, daemon=True).start()
        return await future
