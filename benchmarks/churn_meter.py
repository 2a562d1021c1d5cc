"""Defines the rollouts of a benchmark, and measures a worker's CPU and memory: at first, at most and at rest.

Memory is the resident bytes of the process alone, as counted by the kernel. `rollout_churn.py` runs the work;
`gauge.py` sums over many processes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gauge import TICK, Slope, fitted

SECONDS = 0.1  # between two samples
REST = 10.0  # seconds after the last rollout, in which a worker can return memory


class Work(NamedTuple):
    """The work: the number of rollouts, how many run at once, their turns, and the bytes of each turn."""

    kind: str  # `image` or `text`
    rollouts: int
    at_once: int
    turns: int
    size: int

    @property
    def calls(self) -> int:
        return self.rollouts * self.turns

    def __str__(self) -> str:
        size = self.size * (4 / 3 if self.kind == "image" else 1) / 1000  # an image is sent as a data URL
        each = f"{size:g} KB{' image' * (self.kind == 'image')}"
        return f"{self.rollouts:,} rollouts x {self.turns} turns x {each}, {self.at_once} at once"


class Seen(NamedTuple):
    """A worker's usage for some rollouts. Memory is in bytes, CPU in seconds."""

    start: int
    peak: int
    rest: int
    cpu: float
    seconds: float
    samples: list[tuple[int, int]]  # finished rollouts, and memory
    beside: float = 0.0  # CPU of the worker's parent process

    def slope(self) -> Slope:
        """Return the bytes per rollout over the second half."""
        total = self.samples[-1][0]
        half = [(float(done), float(size)) for done, size in self.samples if done >= total / 2]
        return fitted([done for done, _ in half], [size for _, size in half])

    def tenths(self) -> list[float]:
        """Return the mean memory in each tenth of the rollouts that has readings."""
        total = self.samples[-1][0]
        parts = [[size for done, size in self.samples if done * 10 // (total + 1) == n] for n in range(10)]
        return [sum(part) / len(part) for part in parts if part]


def measured(
    pid: int, work: Callable[[], None], done: Callable[[], int] = lambda: 0, beside: int | None = None
) -> Seen:
    """Measure a worker during `work`; `done` returns the number of finished rollouts."""
    start, before, began = resident(pid), _cpu(pid), time.monotonic()
    others = _cpu(beside) if beside is not None else 0.0
    samples: list[tuple[int, int]] = []  # bound: ten per second
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SECONDS):
            samples.append((done(), resident(pid)))

    thread = threading.Thread(target=sample, name="meter")
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    seconds, cpu = time.monotonic() - began, _cpu(pid) - before
    others = _cpu(beside) - others if beside is not None else 0.0
    peak = resident(pid, "VmHWM")
    time.sleep(REST)
    return Seen(start, peak, resident(pid), cpu, seconds, samples, others)


def resident(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"the process is gone: {pid}")


def _cpu(pid: int) -> float:
    """Return the CPU seconds of a process, including threads that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
