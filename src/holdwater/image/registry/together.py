"""Several things at once, with one error at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ...core.errors import HoldwaterError, let_go


async def together(*jobs: Coroutine[Any, Any, Any]) -> list[Any]:
    """What they return, done at once. Of what goes wrong, the first error of ours is raised, by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        ours = next((error for error in errors.exceptions if isinstance(error, HoldwaterError)), None)
        if ours is None:
            raise
        let_go(errors)
    else:
        return [task.result() for task in tasks]
    raise ours
