"""The parts of a run that belong to its process: signals, keys, the environment and the event loop.

`holdwater --help` imports this module, so it imports as little as possible.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..run.conductor.signals import INTERRUPTED as INTERRUPTED
from ..run.conductor.signals import CommandSignals as CommandSignals
from ..run.conductor.signals import disregard as disregard
from ..run.setup.keys import take_keys as take_keys
from ..run.setup.keys import take_variables as take_variables

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

T = TypeVar("T")

LAST_SECONDS = 2.0  # seconds that remaining tasks get to end


def read_variables() -> dict[str, str]:
    """Return the environment of this process without its keys."""
    from ..run.setup.config import read_environment

    return read_environment().inherited


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on its own event loop. Tasks of agents that do not end are not awaited."""
    import uvloop

    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_cancel_others(loop))
        loop.close()


async def _cancel_others(loop: AbstractEventLoop) -> None:
    import asyncio

    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LAST_SECONDS)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, also if an event loop is already running, as in a notebook."""
    import asyncio
    import threading

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return complete(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(complete(work))
        except BaseException as error:  # boundary: raised again in the caller's thread  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=body, name="holdwater")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
