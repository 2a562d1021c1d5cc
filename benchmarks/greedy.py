"""Suites and agents that use much memory: in their sandbox, in their worker, or as a leak. Scenes use them.

An instance's `data` holds its amount of memory; the suite's name holds the duration and the number of
instances.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import holdwater as hw

MEAN, SIGMA, LEAST, MOST = 40, 0.65, 10, 200  # MB
STEP = 2  # MB allocated at once
RAMP = 1.0  # seconds until an attempt has its full memory
LEAK = 20  # MB

TAKE = """
import time
mb, ramp, hold = {mb}, {ramp}, {hold}
steps = max(1, mb // {step})
kept = []
for _ in range(steps):
    kept.append(b"x" * ({step} << 20))
    time.sleep(ramp / steps)
time.sleep(hold)
"""


def peaks(count: int) -> list[int]:
    """Return the peaks in MB: log-normal, and reproducible."""
    dice = random.Random(7)
    drawn = (dice.lognormvariate(math.log(MEAN) - SIGMA**2 / 2, SIGMA) for _ in range(100 * count))
    return [int(mb) for mb in drawn if LEAST <= mb <= MOST][:count]


def _suite(count: int, hold: float) -> hw.Suite:
    def instances() -> Iterator[hw.Instance]:
        for number, mb in enumerate(peaks(count)):
            yield hw.Instance(id=f"wants-{number:03d}", data={"mb": mb, "hold": hold})

    return hw.Suite(name=f"greedy-{count}", instances=instances, grade=_grade)


async def _grade(instance: hw.Instance, sandbox: hw.Sandbox, answer: Any) -> bool:
    return bool(answer == instance.data["mb"])


few, some, many = _suite(20, 1.0), _suite(60, 2.0), _suite(150, 3.0)
lasting = _suite(20, 600.0)


async def in_sandbox(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> int:
    mb: int = instance.data["mb"]
    code = TAKE.format(mb=mb, ramp=RAMP, hold=instance.data["hold"], step=STEP)
    result = await sandbox.run(["python3", "-c", code])
    if not result.ok:
        raise RuntimeError(result.output)
    return mb


async def in_worker(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    mb: int = instance.data["mb"]
    kept = []
    steps = max(1, mb // STEP)
    for _ in range(steps):
        kept.append(b"x" * (STEP << 20))
        await asyncio.sleep(RAMP / steps)
    await asyncio.sleep(instance.data["hold"])
    return mb


def in_thread(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    mb: int = instance.data["mb"]
    kept = b"x" * (mb << 20)
    time.sleep(instance.data["hold"])
    return len(kept) >> 20


# Leaks.


def _plain_suite(count: int) -> hw.Suite:
    def instances() -> Iterator[hw.Instance]:
        for number in range(count):
            yield hw.Instance(id=f"leaks-{number:03d}", data={"mb": LEAK})

    return hw.Suite(name=f"leaking-{count}", instances=instances, grade=_grade)


leaking_30, leaking_500 = _plain_suite(30), _plain_suite(500)
_left: list[Any] = []
LINGER = 1.0  # additional seconds that an attempt takes


async def leak_nothing(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    await asyncio.sleep(LINGER)
    return LEAK


async def leak_references(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    await asyncio.sleep(LINGER)
    _left.append(b"x" * (LEAK << 20))
    return LEAK


class _Node:
    def __init__(self) -> None:
        self.itself = self
        self.load = b"x" * (LEAK << 20)


async def leak_cycles(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    await asyncio.sleep(LINGER)
    _Node()
    return LEAK


async def leak_heap(instance: hw.Instance, sandbox: Any, model: Any) -> int:
    await asyncio.sleep(LINGER)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    for _ in range(LEAK):
        if block := libc.malloc(ctypes.c_size_t(1 << 20)):
            ctypes.memset(block, 1, 1 << 20)
    return LEAK


# An attempt that needs more than it requests, and one large attempt among many small ones.


def _needy_suite(count: int) -> hw.Suite:
    def instances() -> Iterator[hw.Instance]:
        for number in range(count):
            asks = hw.LimitOverrides(memory=128 << 20)
            yield hw.Instance(id=f"needs-{number:03d}", data={"mb": 300, "hold": 0.5}, limits=asks)

    return hw.Suite(name=f"needy-{count}", instances=instances, grade=_grade)


needy_4, needy_30 = _needy_suite(4), _needy_suite(30)


def _mixed() -> Iterator[hw.Instance]:
    for number in range(40):
        large = number == 5
        asks = hw.LimitOverrides(memory=(260 if large else 40) << 20)
        name = "large" if large else f"small-{number:02d}"
        yield hw.Instance(id=name, data={"mb": 200 if large else 10, "hold": 0.3}, limits=asks)


mixed = hw.Suite(name="mixed", instances=_mixed, grade=_grade)


# Set-up that uses memory: it fetches data before the agent acts.

FETCHED, FETCHING = 260, 3.0  # MB, seconds
FETCH = f"import time; kept = b'x' * ({FETCHED} << 20); print(len(kept), flush=True); time.sleep({FETCHING})"


def _fetched() -> Iterator[hw.Instance]:
    with subprocess.Popen([sys.executable, "-c", FETCH], stdout=subprocess.PIPE) as fetching:
        assert fetching.stdout is not None
        fetching.stdout.readline()  # it has its memory: from here on other attempts could start
        for number in range(4):
            yield hw.Instance(id=f"after-{number}", data={"mb": 20, "hold": 0.2})


fetching = hw.Suite(name="fetching", instances=_fetched, grade=_grade)
