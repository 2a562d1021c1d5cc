"""Ties the limit that the CPU sets to a run: measures what its attempts use of it, and tells what changed."""

from __future__ import annotations

import os
import time

from ..governor.cpu import count_cores, read_queued, read_stalled, read_used
from ..governor.crowding import CpuLimit, CpuUse
from .fleet import Census

LOOK_SECONDS = 1.0


class Crowd:
    """One run's, where `--concurrency` is `auto`."""

    def __init__(self, slots: int) -> None:
        self._limit = CpuLimit(count_cores())
        self._slots = slots
        self._sandboxes = 0.0  # seconds that all sandboxes have used
        self._before: dict[int, float] = {}  # attempt -> seconds; bound: the run's concurrency
        self._waited = 0.0  # seconds that some task waited, where the kernel tells of run queues alone
        self._queued = read_queued()
        self._at = self._looked = time.monotonic()

    @property
    def most(self) -> int:
        return min(self._slots, self._limit.most)

    def look(self, census: Census, running: int, waiting: bool) -> str:
        """What is another limit than before, in words; nothing if it is the same."""
        before, now = self.most, time.monotonic()
        if now < self._looked + LOOK_SECONDS:
            return ""
        self._looked = now
        cpu = {attempt: use.cpu for attempt, use in census.uses.items()}
        self._sandboxes += sum(max(0.0, told - self._before.get(a, 0.0)) for a, told in cpu.items())
        self._before = cpu
        used = self._sandboxes + read_used((os.getpid(), *census.pids))
        stalled = read_stalled()
        use = CpuUse(at=now, used=used, stalled=self._wait(now) if stalled is None else stalled)
        if not self._limit.look(use, running, waiting) or self.most == before:
            return ""
        why = "tasks wait for the CPU" if self._limit.crowded else "there is CPU to spare"
        return f"{self.most} attempts at once, before: {before}: {why}"

    def _wait(self, now: float) -> float:
        """Where pressure is not told: the part of their time that tasks spend in run queues counts."""
        queued, seconds = read_queued(), now - self._at
        if queued is not None and self._queued is not None:
            ran, waited = queued[0] - self._queued[0], queued[1] - self._queued[1]
            self._waited += seconds * waited / (ran + waited) if ran + waited > 0 else 0.0
        self._queued, self._at = queued, now
        return self._waited
