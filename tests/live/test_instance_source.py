"""Instances pulled from suites of every kind: lazily, in order, and kept when the suite goes wrong."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ledger_runs import new_run
from tests.wait_bounds import stretch

from holdwater.core.authoring import Suite
from holdwater.core.config import RunConfig
from holdwater.core.errors import BadInput, SuiteFailed
from holdwater.core.events import SampleOpened
from holdwater.core.records import Instance
from holdwater.ledger.ledger import Ledger
from holdwater.run.conductor.feed import RunFeed
from holdwater.run.conductor.instance_source import InstanceSource


def numbered(count: int) -> Iterator[Instance]:
    for number in range(count):
        yield Instance(id=f"i{number}")


async def numbered_later(count: int) -> AsyncIterator[Instance]:
    for number in range(count):
        await asyncio.sleep(0)
        yield Instance(id=f"i{number}")


def source(instances: Callable[[], Any], size: int | None = None, **config: Any) -> InstanceSource:
    suite = Suite(name="s", instances=instances, size=size)
    return InstanceSource(suite, RunConfig(id="r", suite="s", agent="a", created=0.0, version="0", **config))


async def drained(given: InstanceSource, count: int = 4) -> list[str]:
    """The ids of everything there is, pulled `count` at a time."""
    ids: list[str] = []
    async with asyncio.timeout(stretch(20)):
        while taken := await given.take(count):
            assert len(taken) <= count
            ids += [instance.id for instance, _ in taken]
    given.close()
    return ids


def ids(*numbers: int) -> list[str]:
    return [f"i{number}" for number in numbers]


@pytest.mark.parametrize(
    "instances",
    [
        lambda: numbered(10),
        lambda: numbered_later(10),
        lambda: list(numbered(10)),
        lambda: (instance for instance in numbered(10)),
        lambda: iter(tuple(numbered(10))),
    ],
)
@pytest.mark.parametrize("count", [1, 3, 10, 100])
async def test_every_instance_comes_once_and_in_order(instances, count):
    given = source(instances)

    assert await drained(given, count) == ids(*range(10))
    assert given.error is None
    assert await given.take(1) == [], "the end stays the end"


async def test_an_empty_suite_is_over_at_once():
    given = source(list)

    assert (await given.take(5), given.error) == ([], None)


async def test_each_instance_knows_its_place():
    taken = await source(lambda: numbered(1)).take(5)

    assert taken == [(Instance(id="i0"), "instance 1 of suite `s`")]


async def test_a_suite_without_end_is_pulled_no_further_than_asked():
    made = 0

    def endless() -> Iterator[Instance]:
        nonlocal made
        for made in itertools.count(1):
            yield Instance(id=f"i{made}")

    given = source(endless)
    got = 0
    while got < 50:
        got += len(await given.take(5))
    given.close()

    assert made <= got + 6


async def test_a_plain_suite_runs_off_the_loop_and_in_one_thread():
    threads: set[threading.Thread] = set()

    def instances() -> Iterator[Instance]:
        for number in range(5):
            threads.add(threading.current_thread())
            yield Instance(id=f"i{number}")

    await drained(source(instances), count=1)

    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert all(thread.daemon for thread in threads)


async def test_a_slow_suite_gives_its_instances_at_once_and_is_not_hung():
    """Given one that needs less than the limit for each instance and more for all, it is slow, not hung."""
    wanted, limit = threading.Event(), stretch(0.125)

    def instances() -> Iterator[Instance]:
        yield Instance(id="i0")
        wanted.wait(stretch(10))
        for number in range(1, 5):
            threading.Event().wait(0.3 * limit)
            yield Instance(id=f"i{number}")

    given = source(instances, suite_timeout=limit)
    async with asyncio.timeout(stretch(5)):
        first = await given.take(5)
    wanted.set()

    assert [instance.id for instance, _ in first] == ids(0)
    assert await drained(given, count=5) == ids(1, 2, 3, 4)
    assert given.error is None


# Suites that go wrong: what came before is kept.


def raising_at(number: int, error: BaseException) -> Iterator[Instance]:
    yield from numbered(number)
    raise error


async def raising_later(number: int, error: BaseException) -> AsyncIterator[Instance]:
    for instance in numbered(number):
        yield instance
    raise error


@pytest.mark.parametrize("kind", [raising_at, raising_later])
@pytest.mark.parametrize("error", [KeyError("gone"), SystemExit(1), KeyboardInterrupt()])
async def test_a_suite_that_raises_keeps_what_it_yielded(kind, error):
    given = source(lambda: kind(6, error))

    assert await drained(given) == ids(*range(6))
    assert isinstance(given.error, SuiteFailed)
    assert f"suite `s` raised while yielding instance 7: {type(error).__name__}" in given.error.message
    assert f"{__file__}, line" in given.error.message
    assert given.error.exit_status == 2


async def test_a_bad_input_error_of_a_suite_is_passed_on_unchanged():
    error = BadInput("rows.jsonl:3: `id` is missing")
    given = source(lambda: raising_at(2, error))

    assert await drained(given) == ids(0, 1)
    assert given.error is error


async def test_a_suite_whose_function_raises_yields_nothing():
    def broken() -> Any:
        raise OSError("no such file")

    given = source(broken)

    assert await drained(given) == []
    assert given.error is not None
    assert "raised while yielding instance 1: OSError: no such file" in given.error.message


@pytest.mark.parametrize("made", [None, 5])
async def test_a_suite_that_is_not_iterable_is_an_error(made):
    given = source(lambda: made)

    assert await drained(given) == []
    assert given.error is not None and "not iterable" in given.error.message


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_suite_that_hangs_keeps_what_it_yielded(kind):
    release, limit = threading.Event(), stretch(0.05)

    def instances() -> Iterator[Instance]:
        yield from numbered(3)
        release.wait(stretch(60))

    async def instances_later() -> AsyncIterator[Instance]:
        for instance in numbered(3):
            yield instance
        while not release.is_set():
            await asyncio.sleep(0.01)

    given = source(instances if kind == "def" else instances_later, suite_timeout=limit)

    assert await drained(given) == ids(0, 1, 2)
    assert given.error is not None
    assert given.error.message == f"suite `s` yielded no instance for {limit:g} s"
    release.set()


async def test_an_async_suite_that_blocks_does_not_stall_the_loop():
    release = threading.Event()

    async def instances() -> AsyncIterator[Instance]:
        yield Instance(id="i0")
        release.wait(stretch(30))

    given = source(instances, suite_timeout=stretch(0.05))

    assert await drained(given) == ids(0)
    assert given.error is not None and "yielded no instance" in given.error.message
    release.set()


@pytest.mark.parametrize("odd", ["i2", None, {"id": "i2"}, Instance])
async def test_an_object_other_than_an_instance_ends_the_suite_with_its_type(odd):
    given = source(lambda: [*numbered(2), odd, Instance(id="i3")])

    assert await drained(given) == ids(0, 1)
    assert given.error is not None
    assert f"yielded {type(odd).__name__} as instance 3: expected `Instance`" in given.error.message


# Choosing.


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"only": ("i1", "i7")}, (1, 7)),
        ({"only": ("i[0-2]", "*8")}, (0, 1, 2, 8)),
        ({"only": ("I1",)}, ()),
        ({"limit": 3}, (0, 1, 2)),
        ({"limit": 100}, range(10)),
        ({"shard": (1, 3)}, (0, 3, 6, 9)),
        ({"shard": (3, 3)}, (2, 5, 8)),
        ({"shard": (2, 3), "limit": 2}, (1, 4)),
        ({"only": ("i[0-5]",), "shard": (1, 2), "limit": 2}, (0, 2)),
    ],
)
@pytest.mark.parametrize("count", [1, 4, 100])
async def test_only_limit_and_shard_choose(chosen, expected, count):
    given = source(lambda: numbered(10), **chosen)

    assert await drained(given, count) == ids(*expected)
    assert given.error is None


async def test_the_shards_of_a_suite_are_the_suite():
    found = [await drained(source(lambda: numbered(11), shard=(part, 4))) for part in range(1, 5)]

    assert sorted(itertools.chain(*found)) == sorted(ids(*range(11)))


async def test_a_limit_ends_the_pulling_before_the_suite_goes_wrong():
    given = source(lambda: raising_at(3, OSError("no")), limit=3)

    assert await drained(given, count=100) == ids(0, 1, 2)
    assert given.error is None


@pytest.mark.parametrize(
    ("size", "chosen", "total"),
    [
        (None, {}, None),
        (10, {}, 10),
        (10, {"limit": 3}, 3),
        (2, {"limit": 3}, 2),
        (10, {"shard": (1, 3)}, 4),
        (10, {"shard": (3, 3)}, 3),
        (10, {"shard": (1, 3), "limit": 2}, 2),
        (10, {"only": ("i1",)}, None),
    ],
)
async def test_the_total_is_given_where_it_is_known(size, chosen, total):
    assert source(lambda: numbered(10), size, **chosen).total == total


# What a source yields, written to the ledger.


@pytest.mark.parametrize(
    "odd",
    [
        Instance(id="odd", data={"a": object()}),
        Instance(id="odd", data={"a": {1: {2, "x"}}, "b": "\ud800"}),
        Instance(id="odd", instruction=5),  # type: ignore[arg-type]
        Instance(id="odd", limits=7),  # type: ignore[arg-type]
        Instance(id="odd", directory=Path("/tmp")),  # type: ignore[arg-type]
    ],
    ids=["object", "surrogate", "instruction", "limits", "path"],
)
async def test_an_instance_that_cannot_be_stored_ends_the_suite_after_earlier_ones(tmp_path, odd):
    given = source(lambda: [*numbered(3), odd, Instance(id="i4")])
    config = RunConfig(id="r", suite="s", agent="a", created=0.0, version="0", samples=2)
    opened: list[SampleOpened] = []
    async with Ledger(new_run(tmp_path / "run")) as ledger:
        feed = RunFeed(config, ledger, given, resumed=False)
        while taken := await feed.take(100):
            opened += taken
        feed.close()
        known = [await ledger.find_known(name) for name in (*ids(0, 1, 2), "odd", "i4")]

    assert [(event.instance, event.sample) for event in opened] == [(r, s) for r in (1, 2, 3) for s in (0, 1)]
    assert [row is not None for row in known] == [True, True, True, False, False]
    assert isinstance(feed.error, BadInput)
    assert "instance 4 of suite `s` (`odd`) cannot be stored" in feed.error.message
