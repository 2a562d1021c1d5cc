"""The gate is held for several reasons at once, and by whoever waits for no memory, too."""

from __future__ import annotations

import asyncio

from holdwater.core.records import Failure, GiB
from holdwater.governor.gate import Gate
from holdwater.governor.reading import Bound


def gate(limit: int = 8 * GiB) -> Gate:
    gate = Gate()
    gate.measured((Bound("budget", limit, 0, "`--memory`"),), {})
    return gate


async def taken(gate: Gate, attempt: int, need: int) -> asyncio.Task[Failure | None]:
    """An attempt that has asked for its lease."""
    task = asyncio.get_running_loop().create_task(gate.take(attempt, need))
    await asyncio.sleep(0)
    return task


async def test_nobody_is_admitted_until_the_last_reason_is_gone() -> None:
    held = gate()
    held.hold("disk")
    held.hold("memory")
    task = await taken(held, 1, 1 * GiB)

    held.release("memory")
    assert held.waiting == (1,)
    held.release("disk")

    assert await task is None
    assert held.lease(1) == 1 * GiB


async def test_who_needs_no_memory_waits_for_a_reason_and_for_nothing_else() -> None:
    held = gate(limit=0)
    held.hold("disk")
    task = await taken(held, 1, 0)
    assert held.waiting == (1,)

    held.release("disk")

    assert await task is None
    assert await held.take(2, 0) is None
