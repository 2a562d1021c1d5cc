"""Pulls instances from a suite, a few at a time, in the order in which the suite yields them.

The suite runs in its own thread, so that a slow one stalls nothing else. Its failure is kept as `error`;
instances yielded before it still count.
"""

from __future__ import annotations

import asyncio
import fnmatch
import threading
import traceback
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from itertools import islice
from typing import Any

import msgspec

from ...core.authoring import Suite
from ...core.config import RunConfig
from ...core.errors import BadInput, HoldwaterError, SuiteFailed
from ...core.input_checks import find_bad_paths
from ...core.records import Instance, Network
from ...image.naming import assign_image
from ...rollout.sandbox_kinds import find_kind
from .instance_selection import InstanceSelection, SelectionMarks

BATCH = 256
READ_MORE = 10  # a search for known instances reads 10 times their number,
READ_LEAST = 100_000  # and this many more, before the rest count as missing: a suite may have no end


class InstanceSource:
    """The chosen instances of one pass over a suite."""

    def __init__(self, suite: Suite, config: RunConfig, selection: InstanceSelection | None = None) -> None:
        self._suite = suite
        self._config = config
        # Of the selection; a suite may have no end: ids are missing that do not come among `most` instances.
        self._selection = selection
        self._marks = None if selection is None else SelectionMarks(selection)
        self.most = None if selection is None else READ_LEAST + READ_MORE * len(selection)
        self._position = 0  # instances that the suite has yielded
        self._chosen = 0
        self.matched = 0  # instances that `--only` lets through, of every shard
        self._over = False
        self._thread: _SuiteThread | None = None
        self.error: HoldwaterError | None = None

    @property
    def total(self) -> int | None:
        """The number of instances that will be chosen, or None if it is unknown before pulling them."""
        total = self._suite.size if self._selection is None else len(self._selection)
        if total is None or self._config.only:
            return None
        if self._config.shard is not None:
            if self._selection is not None:
                return None
            part, parts = self._config.shard
            total = len(range(part - 1, total, parts))
        return total if self._config.limit is None else min(total, self._config.limit)

    async def take(self, count: int) -> list[tuple[Instance, str]]:
        """Return 1 to `count` instances with their places, as soon as there are any; none at the end."""
        taken: list[tuple[Instance, str]] = []
        while not taken and not self._over:
            for item in await self._pull(count):
                chosen = self._choose(item)
                if chosen is not None:
                    taken.append(chosen)
        return taken

    @property
    def reached_most(self) -> bool:
        return self._position == self.most

    def list_missing(self) -> Iterator[tuple[str, str]]:
        """Yield the selected ids that have not come so far, with their places in the list."""
        return iter(()) if self._marks is None else self._marks.list_missing()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()

    async def _pull(self, count: int) -> list[Any]:
        try:
            if self._thread is None:
                self._thread = _SuiteThread(self._suite.instances)
            async with asyncio.timeout(self._config.suite_timeout):
                items = await self._thread.pull(count)
        except TimeoutError:
            self._fail(f"yielded no instance for {self._config.suite_timeout:g} s")
            return []
        if not items and self._thread.error is not None:
            self._fail_with(self._thread.error, self._position + 1)
        elif not items:
            self._end()
        return items

    def _end(self) -> None:
        """End the pass. It fails if the suite yielded fewer instances than its declared size."""
        self._over = True
        if self._suite.size is not None and self._position < self._suite.size:
            self._fail(f"declares {self._suite.size} instances (`size`) and yielded {self._position}")

    def _choose(self, item: Any) -> tuple[Instance, str] | None:
        if self._over:  # the limit is reached, or an earlier item was invalid
            return None
        self._position += 1
        place = f"instance {self._position} of suite `{self._suite.name}`"
        if not isinstance(item, Instance):
            self._fail(f"yielded {type(item).__name__} as instance {self._position}: expected `Instance`")
            return None
        config = self._config
        if self._marks is not None:
            selected = self._marks.mark(item.id)
            self._over = self._marks.complete or self.reached_most
            if not selected:
                return None
        if config.only and not any(fnmatch.fnmatchcase(item.id, pattern) for pattern in config.only):
            return None
        self.matched += 1
        if config.shard is not None and (self._position - 1) % config.shard[1] != config.shard[0] - 1:
            return None
        self._chosen += 1
        if self._limit_reached():
            self._over = True
        if wrong := self._find_wrong_path(item, place):
            self._fail_with(wrong, self._position)
            return None
        instance = self._name_image(self._permit(item), place)
        return None if instance is None else (instance, place)

    @staticmethod
    def _find_wrong_path(instance: Instance, place: str) -> BadInput | None:
        for stage, start in (("start", instance.start), ("grader", instance.grader)):
            for field, problem in find_bad_paths(start) if start is not None else ():
                return BadInput(f"{place} (`{instance.id[:200]}`): field `{stage}.{field}` {problem}")
        return None

    def _permit(self, instance: Instance) -> Instance:
        """Return the instance, refused if it requires an open network that the run does not give."""
        network = self._config.network
        if not instance.open_network or network is Network.OPEN:
            return instance
        reason = f"{instance.open_network}: an open network is given with `--network open`; it is `{network}`"
        return Instance(id=instance.id, instruction=instance.instruction, data=instance.data, refused=reason)

    def _name_image(self, instance: Instance, place: str) -> Instance | None:
        """Return the instance with its image, if it needs one; None after a failure."""
        if not find_kind(self._config.sandbox).takes_images:
            return instance
        template = self._config.images.template if self._config.images else None
        try:
            return assign_image(instance, self._suite.image, template, place)
        except Exception as error:  # boundary: the suite's own naming may raise anything  # noqa: BLE001
            self._fail_with(error, self._position)
            return None

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
        self.error = SuiteFailed(
            f"suite `{self._suite.name}` {what}", "the instances yielded before are kept"
        )


async def first_instances(
    suite: Suite, config: RunConfig, count: int, selection: InstanceSelection | None = None
) -> list[str]:
    """Return the ids of the first instances that `--only` selects, in any shard; raise the suite's error."""
    source = InstanceSource(suite, msgspec.structs.replace(config, shard=None, limit=count), selection)
    names: list[str] = []
    try:
        while items := await source.take(count):
            names += [instance.id for instance, _ in items]
    finally:
        source.close()
    if source.error is not None and not names:
        raise source.error
    return names


async def check_selected(suite: Suite, config: RunConfig, selection: InstanceSelection) -> None:
    """Raise BadInput, which names the line of the list, if the suite lacks a selected instance."""
    whole = msgspec.structs.replace(config, only=(), shard=None, limit=None)
    source = InstanceSource(suite, whole, selection)
    try:
        while await source.take(BATCH):
            pass
    finally:
        source.close()
    if source.error is not None:
        raise source.error
    if missing := list(islice(source.list_missing(), 2)):
        place, name = missing[0]
        more = ", and others" if len(missing) > 1 else ""
        hint = f"only its first {source.most} instances were read" if source.reached_most else ""
        raise BadInput(f"{place}: no such instance in suite `{suite.name}`: `{name[:200]}`{more}", hint)


class _SuiteThread:
    """Pulls from an iterable in its own daemon thread, no more than requested.

    Items are handed over as they come: a slow suite stalls no caller, and a hung one loses no items.
    """

    def __init__(self, instances: Callable[[], Any]) -> None:
        self._function = instances
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._changed = threading.Condition()  # guards the fields below
        self._wanted = 0
        self._items: list[Any] = []  # bound: the count requested by `pull`
        self._over = False  # no more will come
        self._closed = False
        self.error: BaseException | None = None
        threading.Thread(target=self._serve, name="suite", daemon=True).start()

    async def pull(self, count: int) -> list[Any]:
        """Return 1 to `count` items; none at the end, after which `error` holds the reason, if any."""
        with self._changed:
            self._wanted = count
            self._changed.notify()
        await self._arrived.wait()
        with self._changed:
            items, self._items, self._wanted = self._items, [], 0
            if not self._over:
                self._arrived.clear()
        return items

    def close(self) -> None:
        """End the thread at its next item. A thread that hangs in the suite's code delays no caller."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _serve(self) -> None:
        try:
            made = self._function()
            for item in _iterate_blocking(made) if hasattr(made, "__aiter__") else made:
                if not self._hand_over(item):
                    break
        except BaseException as error:  # boundary: the suite's code may raise anything  # noqa: BLE001
            self.error = error
        with self._changed:
            self._over = True
        self._wake_loop()

    def _hand_over(self, item: Any) -> bool:
        """Hand over the item and wait until the next is requested; return False after `close`."""
        with self._changed:
            first = not self._items
            self._items.append(item)
        if first:
            self._wake_loop()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._wanted)
            return not self._closed

    def _wake_loop(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            return  # the loop is closed: no caller waits


def _iterate_blocking(instances: AsyncIterable[Any]) -> Iterator[Any]:
    """Iterate over an async iterable on its own event loop in this thread."""
    iterator = aiter(instances)
    with asyncio.Runner() as runner:
        while (item := runner.run(_next_item(iterator))) is not _END:
            yield item


async def _next_item(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)


_END = object()
