"""Measures a server under the load of days of training in hours: memory of worker and server by time.

The load is that of a browser environment: an image in each of 45 turns, groups of 8. A turn that takes 20 s
in training takes 0.8 s here, so that an hour has the rollouts of a day. `rollout_churn.py --hours N` runs it.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import plot
from churn_meter import resident
from gauge import MB, Slope, fitted
from launch import size_of
from table import Row, say

from holdwater.client import AsyncClient, Instance
from holdwater.core.groups import GroupTerms

GROUPS, MEMBERS = 4, 8  # groups at once, and their rollouts
TURNS = 45
IMAGE = 112_500  # bytes: 150 KB in a data URL
TURN_SECONDS = 20.0  # of training: most of it is the model
HASTE = 24.0  # a day in an hour
EVERY = 1.0  # seconds between two samples
REPORT = 300.0  # seconds between two lines on stderr
WARM = 0.2  # share of the time before the slope is measured


class MemorySample(msgspec.Struct):
    """One row of the file of samples."""

    seconds: float
    worker: int  # bytes
    server: int
    rollouts: int  # finished so far
    groups: int


class TrainingLoad(NamedTuple):
    """The load: how long, and how long each turn takes."""

    hours: float
    pause: float = TURN_SECONDS / HASTE

    def __str__(self) -> str:
        each = f"{TURNS} turns x {IMAGE * 4 / 3 / 1000:g} KB image"
        return f"{self.hours:g} h, groups of {MEMBERS} x {each}, {GROUPS * MEMBERS} rollouts at once"


class TrainingCounts:
    """The finished work of a measurement."""

    def __init__(self) -> None:
        self.rollouts = self.groups = 0


def measure_day(
    address: str, pids: tuple[int, int], load: TrainingLoad, out: Path, samples: Path, drawn: Path | None
) -> list[Row]:
    """Order groups for the time of the load; write a sample each second, and draw them at the end."""
    counts = TrainingCounts()
    with _sampling(pids, counts, samples) as rows:
        asyncio.run(_drive(address, load, counts))
    if drawn is not None:
        _draw(drawn, rows, load)
    return _summarize(rows, load, counts, size_of(out))


async def _drive(address: str, load: TrainingLoad, counts: TrainingCounts) -> None:
    """Keep groups in flight until the time is over; those that run then are finished."""
    until = time.monotonic() + 3600 * load.hours
    numbers = itertools.count()
    data = {"kind": "image", "turns": TURNS, "size": IMAGE, "pause": load.pause}

    async def order_groups(client: AsyncClient, late: float) -> None:
        await asyncio.sleep(late)  # a trainer's groups do not begin in step
        while time.monotonic() < until:
            instance = Instance(id=f"page-{next(numbers)}", instruction="Browse.", data=data)
            result = await client.run_group(instance, MEMBERS, group=GroupTerms())
            if not result.together or any(
                rollout.outcome != "passed" or rollout.exchanges != TURNS for rollout in result.rollouts
            ):
                raise SystemExit(f"a group failed: {[rollout.failure for rollout in result.rollouts]}")
            counts.rollouts += MEMBERS
            counts.groups += 1

    async with AsyncClient(address) as client, asyncio.TaskGroup() as tasks:
        for number in range(GROUPS):
            tasks.create_task(order_groups(client, number * TURNS * load.pause / GROUPS))


@contextmanager
def _sampling(pids: tuple[int, int], counts: TrainingCounts, path: Path) -> Iterator[list[MemorySample]]:
    """Sample the memory of worker and server each second, into a list and a file of JSON lines."""
    worker, server = pids
    rows: list[MemorySample] = []  # bound: one per second
    over, began = threading.Event(), time.monotonic()
    said = began

    def take() -> None:
        nonlocal said
        with path.open("wb", buffering=0) as file:
            while not over.wait(EVERY):
                at = time.monotonic() - began
                sample = MemorySample(
                    round(at, 1), resident(worker), resident(server), counts.rollouts, counts.groups
                )
                rows.append(sample)
                file.write(msgspec.json.encode(sample) + b"\n")
                if time.monotonic() - said > REPORT:
                    said = time.monotonic()
                    say(f"{at / 60:.0f} min: {counts.rollouts} rollouts, worker {sample.worker / MB:.1f} MB")

    thread = threading.Thread(target=take, name="samples")
    thread.start()
    try:
        yield rows
    finally:
        over.set()
        thread.join()


def _draw(path: Path, rows: list[MemorySample], load: TrainingLoad) -> None:
    series = {
        "worker": [(row.seconds / 60, row.worker / MB) for row in rows],
        "server": [(row.seconds / 60, row.server / MB) for row in rows],
    }
    plot.save(path, f"Memory: {load}", "MB", series)


def _summarize(rows: list[MemorySample], load: TrainingLoad, counts: TrainingCounts, disk: int) -> list[Row]:
    seconds = rows[-1].seconds
    turns = counts.rollouts * TURNS
    made = [
        Row(f"{load}: rollouts", counts.rollouts, f"in {seconds / 60:.0f} min"),
        Row(f"{load}: turns a second", round(turns / seconds, 1), "1/s"),
        Row(f"{load}: groups scored together", counts.groups),
        Row(f"{load}: disk", round(disk / MB), "MB"),
    ]
    readings: dict[str, Callable[[MemorySample], int]] = {
        "worker": lambda row: row.worker,
        "server": lambda row: row.server,
    }
    for name, read in readings.items():
        slope = _fit(rows, read, seconds).times(1 / MB)
        flat = slope.value <= 2 * slope.error  # no growth beyond two standard errors
        made += [
            Row(f"{load}: peak memory of the {name}", round(max(map(read, rows)) / MB, 1), "MB"),
            Row(
                f"{load}: memory of the {name} in each tenth",
                " ".join(f"{size / MB:.1f}" for size in _average_tenths(rows, read)),
                "MB",
            ),
            Row(f"{load}: slope of the {name}", f"{slope.value:+.2f} ± {slope.error:.2f}", "MB/h", "0", flat),
        ]
    return made


def _fit(rows: list[MemorySample], read: Callable[[MemorySample], int], seconds: float) -> Slope:
    """Return the growth in bytes per hour, after the first part of the time."""
    warm = [row for row in rows if row.seconds >= WARM * seconds]
    return fitted([row.seconds / 3600 for row in warm], [float(read(row)) for row in warm])


def _average_tenths(rows: list[MemorySample], read: Callable[[MemorySample], int]) -> list[float]:
    size = max(1, len(rows) // 10)
    parts = [rows[start : start + size] for start in range(0, 10 * size, size)]
    return [sum(map(read, part)) / len(part) for part in parts if part]
