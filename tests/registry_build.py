"""A process that appends: what is measured and killed from outside. Arguments: a JSON object; prints one."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.registry_server import engine

from holdwater.core.image import ImageLayer


def peak() -> int:
    """The most memory that this process ever held, in bytes."""
    return _status("VmHWM:")


def resident() -> int:
    return _status("VmRSS:")


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


async def build(asked: dict[str, Any]) -> dict[str, Any]:
    """`bases` into `repositories`, in turn; what is resident is told after each tenth of them."""
    layers = tuple(ImageLayer(**one) for one in asked["layers"])
    jobs = [(base, place) for place in asked["repositories"] for base in asked["bases"]]
    readings, made = [], []
    async with engine(layers) as making:
        await making.foresee(*jobs[0])
        before, began = peak(), time.monotonic()
        tenth = max(1, len(jobs) // 10)
        for start in range(0, len(jobs), tenth):
            part = jobs[start : start + tenth]
            async with asyncio.TaskGroup() as group:
                slots = asyncio.Semaphore(16)

                async def one(base: str, place: str, slots: asyncio.Semaphore = slots) -> Any:
                    async with slots:
                        return await making.make(base, place)

                tasks = [group.create_task(one(*job)) for job in part]
            readings.append(resident())
            made += [(task.result().reference, task.result().how) for task in tasks]
            made = made[-1000:]
        seconds = time.monotonic() - began
    return {"grown": peak() - before, "resident": readings, "made": made, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(build(json.loads(sys.argv[1])))))
