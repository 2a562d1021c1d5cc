"""Scopes on a real event loop: closes that raise, hang or refuse to be cancelled change only the notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from holdwater.rollout import scope as scopes
from holdwater.rollout.scope import Scope


class Scene:
    """A scope and what it noted."""

    def __init__(self, close_seconds: float = 15.0) -> None:
        self.notes: list[tuple[str, str]] = []
        self.closed: list[str] = []
        self.scope = Scope(lambda kind, message: self.notes.append((kind, message)), close_seconds)

    @asynccontextmanager
    async def thing(self, name: str, close: Callable[[], object] = lambda: None) -> AsyncIterator[str]:
        try:
            yield name
        finally:
            ending = close()
            if asyncio.iscoroutine(ending):
                await ending
            self.closed.append(name)


def refuse() -> None:
    raise OSError("no")


async def hang() -> None:
    await asyncio.Event().wait()


async def test_things_are_closed_in_reverse_order():
    scene = Scene()
    async with scene.scope as scope:
        assert await scope.open("a", scene.thing("a")) == "a"
        await scope.open("b", scene.thing("b"))

    assert (scene.closed, scene.notes, scope.stuck) == (["b", "a"], [], 0)


async def test_a_close_that_raises_is_noted_and_the_others_are_closed():
    scene = Scene()
    async with scene.scope as scope:
        await scope.open("a", scene.thing("a"))
        await scope.open("b", scene.thing("b", refuse))

    assert scene.closed == ["a"]
    assert scene.notes == [("close.failed", "b: OSError: no")]


async def test_an_error_in_the_block_is_kept_though_a_close_fails():
    scene = Scene()
    with pytest.raises(ZeroDivisionError):
        async with scene.scope as scope:
            await scope.open("a", scene.thing("a", refuse))
            _ = 1 / 0

    assert scene.notes == [("close.failed", "a: OSError: no")]


async def test_what_could_not_be_opened_is_not_closed():
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        raise OSError("no")
        yield

    scene = Scene()
    with pytest.raises(OSError, match="no"):
        async with scene.scope as scope:
            await scope.open("a", scene.thing("a"))
            await scope.open("b", broken())

    assert (scene.closed, scene.notes) == (["a"], [])


async def test_a_close_that_hangs_is_given_up_and_the_others_are_closed():
    scene = Scene(close_seconds=0.05)
    async with scene.scope as scope:
        await scope.open("a", scene.thing("a"))
        await scope.open("b", scene.thing("b", hang))

    assert scene.closed == ["a"]
    assert scene.notes == [("close.hung", "b: not closed after 0.05 s")]
    assert scope.stuck == 0


async def test_a_close_that_ignores_cancellation_is_counted_as_stuck(monkeypatch):
    monkeypatch.setattr(scopes, "CANCEL_SECONDS", 0.05)
    allowed = asyncio.Event()

    async def stubborn() -> None:
        while not allowed.is_set():
            try:
                await allowed.wait()
            except asyncio.CancelledError:
                continue
        raise OSError("late")

    scene = Scene(close_seconds=0.05)
    async with scene.scope as scope:
        await scope.open("a", scene.thing("a"))
        await scope.open("b", scene.thing("b", stubborn))

    assert (scene.closed, scope.stuck) == (["a"], 1)
    assert [kind for kind, _ in scene.notes] == ["close.hung"]
    allowed.set()


async def test_cancelling_the_owner_while_it_closes_is_put_off_and_not_lost():
    scene = Scene()
    closing, allowed = asyncio.Event(), asyncio.Event()
    went_on = False

    async def slow() -> None:
        closing.set()
        await allowed.wait()

    async def owner() -> None:
        nonlocal went_on
        async with scene.scope as scope:
            await scope.open("a", scene.thing("a"))
            await scope.open("b", scene.thing("b", slow))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        went_on = True

    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        await closing.wait()
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        allowed.set()

    assert scene.closed == ["b", "a"]
    assert task.cancelled() and not went_on


async def test_a_deadline_that_passes_while_it_closes_is_still_a_timeout():
    scene = Scene()
    passed = asyncio.Event()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as deadline:
            async with scene.scope as scope:
                await scope.open("a", scene.thing("a", passed.wait))
                loop = asyncio.get_running_loop()
                deadline.reschedule(loop.time())
                loop.call_later(0.05, passed.set)
                scope_owner = asyncio.current_task()
            await asyncio.Event().wait()

    assert scene.closed == ["a"]
    assert scope_owner is not None and scope_owner.cancelling() == 0
