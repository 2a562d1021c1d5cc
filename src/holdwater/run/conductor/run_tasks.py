"""The tasks that a scheduler starts: all are in one group, and some are cancelled at the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class RunTasks:
    """The tasks of one run. The scheduler opens and closes their group."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        # Bound: the run's concurrency, the periodic tasks, and one pull.
        self._cancellable: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        """Run a coroutine that ends before the run does; after an error, the journals take its place."""
        try:
            return self._group.create_task(work)
        except RuntimeError:  # the group is closing
            work.close()
            return None

    def spawn_cancellable(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that the end of the run cancels."""
        task = self.spawn(work)
        if task is not None:
            self._cancellable.add(task)
            task.add_done_callback(self._cancellable.discard)

    def cancel(self) -> None:
        """Cancel the tasks that are to be cancelled at the end of the run."""
        for task in tuple(self._cancellable):
            task.cancel()
