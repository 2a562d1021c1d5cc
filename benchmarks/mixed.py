"""The suite of `soak.py`: a mix of work, failures, hangs, leaks and high memory usage.

An instance's number decides what it does, so that every run is the same. The variable `SOAK_STOP` (seconds
since the epoch) sets the end of the suite.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from content import text

import holdwater as hw

LEAK = 1 << 20  # bytes
_left: list[bytes] = []  # leaked memory, never freed


def instances() -> Iterator[hw.Instance]:
    stop = float(os.environ["SOAK_STOP"])
    for number in count():
        if time.time() > stop:
            return
        yield hw.Instance(
            id=f"soak-{number}", data={"does": _does(number)}, limits=hw.LimitOverrides(acting=20)
        )


def _does(number: int) -> str:
    """Of a hundred instances, 60 talk, 20 work in a sandbox, and the others fail in some way."""
    place = number * 37 % 100
    for least, what in ((40, "talk"), (20, "work"), (15, "raise"), (12, "leak"), (8, "fail"), (5, "grow")):
        if place >= least:
            return what
    return {4: "hang", 3: "hang", 2: "block", 1: "exceed", 0: "print"}[place]


async def grade(instance: hw.Instance, sandbox: object, answer: object) -> bool:
    return bool(answer == instance.data["does"])


async def live(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    does: str = instance.data["does"]
    await asyncio.sleep(0.2)
    match does:
        case "raise":
            raise RuntimeError("as it was asked to")
        case "leak":
            _left.append(b"x" * LEAK)
        case "hang":
            await asyncio.sleep(1e6)
        case "block":
            await asyncio.to_thread(time.sleep, 3)
        case "talk":
            await _talk(instance, model)
        case "work" | "fail" | "grow" | "exceed" | "print":
            await sandbox.run(COMMANDS[does])
    return does


async def _talk(instance: hw.Instance, model: Any) -> None:
    messages: list[dict[str, Any]] = []
    for turn in range(8):
        messages.append({"role": "user", "content": text(f"{instance.id}/{turn}", 8_000)})
        reply = await model.chat(messages)
        messages.append(reply["choices"][0]["message"])


COMMANDS = {
    "work": "for i in 1 2 3; do head -c 200000 /dev/urandom | sha256sum >> sums; sleep 0.3; done",
    "fail": "exit 3",
    "grow": "python3 -c \"import time; kept = b'x' * (120 << 20); time.sleep(1)\"",
    "exceed": "python3 -c \"import time; kept = b'x' * (400 << 20); time.sleep(1)\"",
    "print": "head -c 50000000 /dev/zero | base64",
}

suite = hw.Suite(name="soak", instances=instances, grade=grade)
