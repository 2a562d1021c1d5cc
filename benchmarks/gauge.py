"""Measures processes from outside: memory as PSS, CPU as user and system time, and the slope of memory.

A thread samples `/proc` while a command runs. The caller selects the processes to count; `launch.py` starts
the command.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import psutil

MB = 1_000_000
TICK = os.sysconf("SC_CLK_TCK")
SECONDS = 0.5  # between two samples


class Sample(NamedTuple):
    """One reading in bytes: the root process and the other counted processes."""

    at: float  # seconds since the start of the watch
    root: int
    others: int

    @property
    def total(self) -> int:
        return self.root + self.others


class Slope(NamedTuple):
    """A slope and its standard error, per unit of its x axis."""

    value: float
    error: float

    def times(self, factor: float) -> Slope:
        return Slope(self.value * factor, self.error * factor)


Counts = Callable[[psutil.Process], bool]


class Watch:
    """Samples a process and its counted descendants until the context ends.

    An ended process counts with its last reading: at most `seconds` of its CPU time are missed.
    """

    def __init__(self, pid: int, counts: Counts, seconds: float = SECONDS) -> None:
        self.samples: list[Sample] = []  # bound: two per second
        self.peaks: dict[int, int] = {}  # pid -> bytes; bound: the processes of one run
        self._cpu: dict[int, float] = {}
        self._counted: dict[int, bool] = {}
        self._root = psutil.Process(pid)
        self._counts = counts
        self._seconds = seconds
        self._begun = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_over, name="watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._read_cpu(self._root.pid)  # a process that is not reaped yet still has its usage

    @property
    def peak(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.total, default=Sample(0.0, 0, 0))

    @property
    def cpu(self) -> float:
        """Return the CPU seconds of all counted processes."""
        return sum(self._cpu.values())

    @property
    def root_cpu(self) -> float:
        return self._cpu.get(self._root.pid, 0.0)

    def slope(self) -> Slope:
        """Return bytes per second over the second half, without the end, when work runs out."""
        last = self.samples[-1].at if self.samples else 0.0
        half = [sample for sample in self.samples if last * 0.5 <= sample.at <= last * 0.95]
        return fitted([sample.at for sample in half], [float(sample.total) for sample in half])

    def _sample_until_over(self) -> None:
        while not self._over.wait(self._seconds):
            self._sample()

    def _sample(self) -> None:
        root = self._read(self._root.pid)
        others = sum(self._read(pid) for pid in self._others())
        if root:
            self.samples.append(Sample(time.monotonic() - self._begun, root, others))

    def _others(self) -> list[int]:
        try:
            children = self._root.children(recursive=True)
        except psutil.Error:
            return []
        return [child.pid for child in children if self._does_count(child)]

    def _does_count(self, child: psutil.Process) -> bool:
        if child.pid not in self._counted:
            try:
                self._counted[child.pid] = self._counts(child)
            except psutil.Error:
                return False
        return self._counted[child.pid]

    def _read(self, pid: int) -> int:
        self._read_cpu(pid)
        size = pss(pid)
        self.peaks[pid] = max(self.peaks.get(pid, 0), size)
        return size

    def _read_cpu(self, pid: int) -> None:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return  # ended: its last reading stays
        self._cpu[pid] = (int(fields[11]) + int(fields[12])) / TICK


def pss(pid: int) -> int:
    """Return the bytes of a process, with shared pages divided equally; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def fitted(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Return the slope of a straight line through the points.

    Consecutive readings are correlated, so they count for fewer than they are: the standard error is that of
    an AR(1) process.
    """
    n = len(x)
    if n < 4:
        return Slope(0.0, math.inf)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = [b - mean_y - slope * (a - mean_x) for a, b in zip(x, y, strict=True)]
    squares = sum(r * r for r in rest)
    alike = sum(a * b for a, b in itertools.pairwise(rest)) / squares if squares else 0.0
    fewer = (1 + min(max(alike, 0.0), 0.98)) / (1 - min(max(alike, 0.0), 0.98))
    return Slope(slope, math.sqrt(squares / (n - 2) / spread * fewer))
