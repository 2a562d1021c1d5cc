"""Calls into foreign code: a thread or a task of its own each; a hung one is counted and holds up nobody."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest
from tests.wait_bounds import stretch

from holdwater.governor.disks import DiskFaults
from holdwater.rollout import user_calls as rollout_calls
from holdwater.rollout.user_calls import UserCalls
from holdwater.rollout.views import BlockingSandbox, SandboxView, adapt_arguments


async def eventually(statement) -> None:
    async with asyncio.timeout(stretch(10)):
        while not statement():
            await asyncio.sleep(0.005)


async def test_a_plain_function_runs_in_a_daemon_thread_of_its_own():
    calls = UserCalls("attempt-7")

    def where(*arguments: int) -> tuple[threading.Thread, tuple[int, ...]]:
        return threading.current_thread(), arguments

    thread, arguments = await calls.call(where, 1, 2)
    another, _ = await calls.call(where)

    assert (thread.name, thread.daemon, arguments) == ("attempt-7", True, (1, 2))
    assert another is not thread
    assert calls.alive == 0


async def test_a_hundred_hung_calls_do_not_delay_another():
    calls, release = UserCalls("hung"), threading.Event()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(calls.call(release.wait)) for _ in range(100)]
            await eventually(lambda: calls.alive == 100)
            assert await calls.call(lambda: "through") == "through"
            for task in tasks:
                task.cancel()
        assert calls.alive == 100, "a cancelled call still runs"
    finally:
        release.set()
    await eventually(lambda: calls.alive == 0)


async def test_a_call_that_was_given_up_may_fail_late():
    calls, release = UserCalls("late"), threading.Event()

    def late() -> None:
        release.wait()
        raise OSError("late")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await calls.call(late)
    release.set()
    await eventually(lambda: calls.alive == 0)


ERRORS = [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_exception_of_a_function_reaches_only_its_caller(kind, error):
    """Given a loop of its own, which an exit in a task would end, when the call fails, then it goes on."""

    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    async def main() -> str:
        try:
            await UserCalls("t").call(fail if kind == "def" else fail_later)
        except Exception as raised:
            return str(raised) or type(raised).__name__
        return "nothing"

    told = asyncio.run(main())

    assert told == "no" or type(error).__name__ in told


async def test_a_task_that_ignores_its_cancellation_is_left_behind_and_counted(monkeypatch):
    monkeypatch.setattr(rollout_calls, "CANCEL_SECONDS", 0.05)
    calls, allowed = UserCalls("t"), asyncio.Event()

    async def stubborn() -> None:
        while not allowed.is_set():
            try:
                await allowed.wait()
            except asyncio.CancelledError:
                continue

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await calls.call(stubborn)
    assert calls.alive == 1
    allowed.set()
    await eventually(lambda: calls.alive == 0)


async def test_a_cancelled_task_ends_before_its_caller_goes_on():
    calls, cleaned = UserCalls("t"), False

    async def tidy() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await calls.call(tidy)

    assert cleaned and calls.alive == 0


async def test_stop_iteration_becomes_an_error_that_a_future_can_carry():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await UserCalls("t").call(lambda: next(iter(())))


class Caller:
    async def __call__(self) -> str:
        return threading.current_thread().name


async def name_of_thread(*_: object) -> str:
    return threading.current_thread().name


@pytest.mark.parametrize(
    "function", [name_of_thread, Caller(), functools.partial(name_of_thread, 1), lambda: name_of_thread()]
)
async def test_async_callables_run_on_the_loop(function):
    assert await UserCalls("t").call(function) == threading.current_thread().name


async def test_a_loop_that_is_gone_hurts_no_thread():
    calls, release = UserCalls("t"), threading.Event()

    def late() -> None:
        release.wait()

    def short_loop() -> None:
        async def main() -> None:
            async with asyncio.timeout(0.02):
                await calls.call(late)

        with pytest.raises(TimeoutError):
            asyncio.run(main())

    await asyncio.get_running_loop().run_in_executor(None, short_loop)
    release.set()
    await eventually(lambda: calls.alive == 0)


async def test_a_blocking_view_raises_on_the_loop_instead_of_stopping_it(tmp_path):
    """Given a plain function that returns a coroutine, it holds blocking views on the loop's own thread."""

    async def inner(sandbox: BlockingSandbox) -> None:
        sandbox.write("a", "b")

    def outer(sandbox: BlockingSandbox) -> object:
        return inner(sandbox)

    view = SandboxView(None, lambda: tmp_path / "out", DiskFaults(), None)
    with pytest.raises(RuntimeError, match="async def"):
        await UserCalls("t").call(outer, *adapt_arguments(outer, view))
