"""Run several coroutines concurrently and raise a single error."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...core.errors import HoldwaterError, drop_tracebacks


async def run_concurrently(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run the jobs concurrently; return their results. Raise the first `HoldwaterError` without its group."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        ours = next((error for error in errors.exceptions if isinstance(error, HoldwaterError)), None)
        if ours is None:
            raise
        drop_tracebacks(errors)
    else:
        return [task.result() for task in tasks]
    raise ours
