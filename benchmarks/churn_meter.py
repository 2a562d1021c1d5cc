"""What rollouts consist of, and what one worker uses for them: memory at first, at most and at rest, and CPU.

Memory is resident bytes, as the kernel counts them for the process alone. What it does is said by
`rollout_churn.py`; sums over many processes are in `gauge.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gauge import TICK, Slope, fitted

SECONDS = 0.1  # between two samples
REST = 10.0  # seconds after the last rollout, when a worker has had time to give memory back


class Work(NamedTuple):
    """So many rollouts, so many of them in flight, of so many turns that each say so many bytes."""

    kind: str  # `image` or `text`
    rollouts: int
    at_once: int
    turns: int
    size: int

    @property
    def calls(self) -> int:
        return self.rollouts * self.turns

    def __str__(self) -> str:
        size = self.size * (4 / 3 if self.kind == "image" else 1) / 1000  # an image in a data URL
        each = f"{size:g} KB{' image' * (self.kind == 'image')}"
        return f"{self.rollouts:,} rollouts x {self.turns} turns x {each}, {self.at_once} at once"


class Seen(NamedTuple):
    """What a worker used for some rollouts. Memory is in bytes, CPU in seconds."""

    start: int
    peak: int
    rest: int
    cpu: float
    seconds: float
    samples: list[tuple[int, int]]  # rollouts that were over, and memory
    beside: float = 0.0  # CPU of the process that the worker works for

    def slope(self) -> Slope:
        """Bytes a rollout over the second half."""
        total = self.samples[-1][0]
        half = [(float(done), float(size)) for done, size in self.samples if done >= total / 2]
        return fitted([done for done, _ in half], [size for _, size in half])

    def tenths(self) -> list[float]:
        """The mean of memory in each tenth of the rollouts, as far as there are readings."""
        total = self.samples[-1][0]
        parts = [[size for done, size in self.samples if done * 10 // (total + 1) == n] for n in range(10)]
        return [sum(part) / len(part) for part in parts if part]


def measured(
    pid: int, work: Callable[[], None], done: Callable[[], int] = lambda: 0, beside: int | None = None
) -> Seen:
    """Let `work` happen; `done` says how many rollouts are over."""
    start, before, began = resident(pid), _cpu(pid), time.monotonic()
    others = _cpu(beside) if beside is not None else 0.0
    samples: list[tuple[int, int]] = []  # bound: ten a second
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
    """Threads that have ended count too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
