"""Runs coroutines for callers without an event loop, and for callers that have one already."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

LAST_SECONDS = 2.0  # seconds that remaining tasks get to end


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on its own event loop. Tasks of agents that do not end are not awaited."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_cancel_others(loop))
        loop.close()


async def _cancel_others(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LAST_SECONDS)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, also if an event loop is already running, as in a notebook."""
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
