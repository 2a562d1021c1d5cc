"""The suite of `held_calls.py`: an agent makes many model calls in sequence and returns their seconds."""

from __future__ import annotations

import time
from typing import Any

import holdwater as hw


async def call(instance: hw.Instance, sandbox: object, model: Any) -> list[float]:
    seconds = []
    for _ in range(instance.data["calls"]):
        begun = time.perf_counter()
        await model.chat([{"role": "user", "content": "Which drawer?"}])
        seconds.append(time.perf_counter() - begun)
    return seconds


async def grade(instance: hw.Instance, sandbox: object, answer: list[float]) -> bool:
    return len(answer) == int(instance.data["calls"])


def answer(request: dict[str, Any]) -> str:
    return "b"


suite = hw.Suite(name="held", instances=lambda: (), grade=grade)
