"""Blocking work in a thread of its own, which ends soon after nobody waits for it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Check = Callable[[], None]  # called between pieces of work: raises where nobody waits for the result any more
T = TypeVar("T")


class Unwanted(Exception):
    """Nobody waits for this work any more."""


async def in_thread(work: Callable[[Check], T]) -> T:
    """What `work` gives. When this is cancelled, its next `check` ends it, and it is waited for."""
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Unwanted

    with ThreadPoolExecutor(1, "layer") as thread:
        future = asyncio.get_running_loop().run_in_executor(thread, work, check)
        try:
            return await asyncio.shield(future)
        finally:
            stop.set()
            await _ended(future)


async def to_the_end(work: Callable[[], T]) -> T:
    """The same for work that is done whole, whoever cancels it: cleaning up."""
    return await in_thread(lambda check: work())


async def _ended(future: asyncio.Future[T]) -> None:
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # the first one is on its way already
    future.exception()  # whoever waited has it, or nobody does
