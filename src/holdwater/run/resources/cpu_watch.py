"""Adapts the number of attempts to the machine's CPU: measures their use, reports changed limits."""

from __future__ import annotations

import os
import time

from ...governor.cpu import count_cores, read_queued, read_stalled, read_used
from ...governor.cpu_limit import CpuLimit, CpuUse
from ..fleet.interface import FleetCensus

LOOK_SECONDS = 1.0


class CpuWatch:
    """The CPU limit of one run, where `--concurrency` is `auto`."""

    def __init__(self, slots: int) -> None:
        self._limit = CpuLimit(count_cores())
        self._slots = slots
        self._sandboxes = 0.0  # seconds that all sandboxes have used
        self._before: dict[int, float] = {}  # attempt -> seconds; bound: the run's concurrency
        self._waited = 0.0  # seconds that some task waited, where the kernel reports only run queues
        self._queued = read_queued()
        self._at = self._looked = time.monotonic()

    @property
    def most(self) -> int:
        return min(self._slots, self._limit.most)

    def look(self, census: FleetCensus, running: int, waiting: bool) -> str:
        """Return a description of the new limit; empty if it is unchanged."""
        before, now = self.most, time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return ""
        self._looked = now
        cpu = {attempt: use.cpu for attempt, use in census.uses.items()}
        self._sandboxes += sum(max(0.0, told - self._before.get(a, 0.0)) for a, told in cpu.items())
        self._before = cpu
        used = self._sandboxes + read_used((os.getpid(), *census.pids))
        stalled = read_stalled()
        use = CpuUse(at=now, used=used, stalled=self._estimate_stall(now) if stalled is None else stalled)
        if not self._limit.update(use, running, waiting) or self.most == before:
            return ""
        why = "tasks wait for the CPU" if self._limit.crowded else "there is CPU to spare"
        return f"{self.most} attempts at once, before: {before}: {why}"

    def _estimate_stall(self, now: float) -> float:
        """Without pressure data, estimate the stall from the share of time that tasks are queued."""
        queued, seconds = read_queued(), now - self._at
        if queued is not None and self._queued is not None:
            ran, waited = queued[0] - self._queued[0], queued[1] - self._queued[1]
            self._waited += seconds * waited / (ran + waited) if ran + waited > 0 else 0.0
        self._queued, self._at = queued, now
        return self._waited
