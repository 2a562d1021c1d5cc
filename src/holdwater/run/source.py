"""Pulls instances from a suite, a few at a time, in the order in which it yields them.

A plain generator runs in a thread of its own, so that a slow one stalls nobody. What a suite does wrong is
kept as `error`; what it yielded before still counts.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..core.authoring import Suite
from ..core.config import RunConfig
from ..core.errors import BadInput, HoldwaterError, SuiteFailed
from ..core.records import Instance


class Source:
    """The chosen instances of one pass over a suite."""

    def __init__(self, suite: Suite, config: RunConfig) -> None:
        self._suite = suite
        self._config = config
        self._position = 0  # instances that the suite has yielded
        self._chosen = 0
        self._over = False
        self._feed: _ThreadFeed | None = None
        self.error: HoldwaterError | None = None

    @property
    def total(self) -> int | None:
        """How many instances will be chosen, where that can be told without pulling them."""
        if self._suite.size is None or self._config.only:
            return None
        total = self._suite.size
        if self._config.shard is not None:
            part, parts = self._config.shard
            total = len(range(part - 1, total, parts))
        return total if self._config.limit is None else min(total, self._config.limit)

    async def take(self, count: int) -> list[tuple[Instance, str]]:
        """Up to `count` instances with their places; an empty list when there are no more."""
        taken: list[tuple[Instance, str]] = []
        while len(taken) < count and not self._over:
            for item in await self._pull(count - len(taken)):
                chosen = self._choose(item)
                if chosen is not None:
                    taken.append(chosen)
        return taken

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()

    async def _pull(self, count: int) -> list[Any]:
        try:
            if self._feed is None:
                self._feed = _ThreadFeed(self._suite.instances)
            async with asyncio.timeout(self._config.suite_timeout):
                items = await self._feed.pull(count)
        except TimeoutError:
            self._fail(f"yielded no instance for {self._config.suite_timeout:g} s")
            return []
        if self._feed.error is not None:
            self._fail_with(self._feed.error, self._position + len(items) + 1)
        elif not items:
            self._over = True
        return items

    def _choose(self, item: Any) -> tuple[Instance, str] | None:
        if self._limit_reached():
            return None
        self._position += 1
        place = f"instance {self._position} of suite `{self._suite.name}`"
        if not isinstance(item, Instance):
            self._fail(f"yielded {type(item).__name__} as instance {self._position}: expected `Instance`")
            return None
        config = self._config
        if config.shard is not None and (self._position - 1) % config.shard[1] != config.shard[0] - 1:
            return None
        if config.only and not any(fnmatch.fnmatchcase(item.id, pattern) for pattern in config.only):
            return None
        self._chosen += 1
        if self._limit_reached():
            self._over = True
        return item, place

    def _limit_reached(self) -> bool:
        return self._config.limit is not None and self._chosen >= self._config.limit

    def _fail_with(self, error: BaseException, position: int) -> None:
        if isinstance(error, BadInput):
            self._over, self.error = True, error
            return
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        where = f" ({frame[0].filename}, line {frame[0].lineno})" if frame else ""
        self._fail(f"raised while yielding instance {position}: {type(error).__name__}: {error}{where}")

    def _fail(self, what: str) -> None:
        self._over = True
        self.error = SuiteFailed(f"suite `{self._suite.name}` {what}", "what it yielded before has been kept")


class _AsyncFeed:
    """Pulls from an async iterable."""

    def __init__(self, instances: AsyncIterator[Any]) -> None:
        self._instances = instances
        self.error: BaseException | None = None

    async def pull(self, count: int) -> list[Any]:
        items: list[Any] = []
        try:
            while len(items) < count:
                items.append(await anext(self._instances))
        except StopAsyncIteration:
            pass  # what was pulled before the end is still to be given
        except Exception as error:  # boundary: the suite's code  # noqa: BLE001
            self.error = error
        return items


class _ThreadFeed:
    """Pulls from a plain iterable in one daemon thread; hands an async one over to `_AsyncFeed`."""

    def __init__(self, instances: Callable[[], Any]) -> None:
        self._function = instances
        self._requests: queue.Queue[tuple[int, asyncio.Future[list[Any]]] | None] = queue.Queue(maxsize=2)
        self._async: _AsyncFeed | None = None
        self.error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._serve, name="suite", daemon=True).start()

    async def pull(self, count: int) -> list[Any]:
        if self._async is None:
            future: asyncio.Future[list[Any]] = self._loop.create_future()
            self._requests.put_nowait((count, future))
            items = await future
            if self._async is None:
                return items
        items = await self._async.pull(count)
        self.error = self._async.error
        return items

    def close(self) -> None:
        try:
            self._requests.put_nowait(None)
        except queue.Full:
            return  # it hangs in the suite's code; a daemon thread holds nobody up

    def _serve(self) -> None:
        instances: Iterator[Any] | None = None
        while (request := self._requests.get()) is not None:
            count, future = request
            items: list[Any] = []
            try:
                if instances is None:
                    instances = self._begin()
                for item in itertools.islice(instances, count):
                    items.append(item)
            except BaseException as error:  # boundary: the suite's code, whatever it raises  # noqa: BLE001
                self.error = error
            try:
                self._loop.call_soon_threadsafe(_deliver, future, items)
            except RuntimeError:
                return  # the loop is closed: nobody waits

    def _begin(self) -> Iterator[Any]:
        made = self._function()
        if hasattr(made, "__aiter__"):
            self._async = _AsyncFeed(made.__aiter__())
            return iter(())
        return iter(made)


def _deliver(future: asyncio.Future[list[Any]], items: list[Any]) -> None:
    if not future.done():
        future.set_result(items)
