"""The suite of `metering.py`: sandboxes that stay idle until they are ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import holdwater as hw


def instances() -> Iterator[hw.Instance]:
    return (hw.Instance(id=f"idle-{number}") for number in range(30))


async def grade(instance: hw.Instance, sandbox: object, answer: object) -> bool:
    return True


async def wait(instance: hw.Instance, sandbox: Any, model: object) -> None:
    await sandbox.run(["sleep", "60"])


suite = hw.Suite(name="idle", instances=instances, grade=grade)
