"""Work that several wait for at once and that is done once: a pull, a build, an image that is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0
        self.left = False  # nobody waited any more: it is being cancelled


class Flights(Generic[T]):
    """Each goes on while anybody waits for it; the last who leaves early ends it, and waits for its end."""

    def __init__(self) -> None:
        self._going: dict[Hashable, _Flight[T]] = {}  # bound: those who wait

    def __contains__(self, key: Hashable) -> bool:
        return key in self._going

    async def join(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the work for this key gives, or raises: begun here unless it is under way."""
        while (flight := self._going.get(key)) is not None and flight.left:
            await asyncio.wait({flight.task})
        if flight is None:
            flight = self._begun(key, work)
        flight.waiting += 1
        try:
            await asyncio.wait({flight.task})
            return flight.task.result()
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.left = True
                flight.task.cancel()
                await asyncio.wait({flight.task})

    def _begun(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> _Flight[T]:
        flight = self._going[key] = _Flight(asyncio.get_running_loop().create_task(work()))

        def landed(task: asyncio.Task[T]) -> None:
            del self._going[key]
            if not task.cancelled():
                task.exception()  # those who waited have it; if there are none any more, nobody asks

        flight.task.add_done_callback(landed)
        return flight
