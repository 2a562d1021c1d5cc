"""The end of a run by a signal, as an error; a signal before the scheduler runs cancels the conductor's task.

`signals.py` receives the signals; `scheduler.py` drains a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...core.errors import RunInterrupted
from .signals import CommandSignals


@contextmanager
def convert_cancellation(signals: CommandSignals) -> Iterator[None]:
    """Turn the cancellation by an early signal into the end `interrupted`."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.count:
            raise
        current_task().uncancel()
        raise make_interruption() from None


def make_interruption() -> RunInterrupted:
    return RunInterrupted("interrupted", "`holdwater resume` continues the run")


def current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task
