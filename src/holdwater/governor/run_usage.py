"""Measures a run: the memory of its own processes, and every bound on memory, as the latest reading.

Cheap enough for every look: expensive values are read rarely, and the last reading is used until then.
"""

from __future__ import annotations

import os
import time

from ..core.config import RunConfig
from ..kernel_files import list_children, read_pss, read_resident, read_tree_memory
from .meter import ResourceMeter
from .resource_reading import FleetCensus

CHILDREN_EVERY = 5  # looks: a pass over all processes of the machine, if there are any workers
SHARES_EVERY = 150  # looks: 1 ms per process
FRESH = 0.05  # seconds: the greatest age of a reading that a lease is granted by


class MemoryFootprint:
    """The memory of conductor, workers, sandboxes and programs of set-up."""

    def __init__(self) -> None:
        self._me = os.getpid()
        self._looks = 0
        self.base = 0  # bytes of conductor and workers at the last reading
        self._shared: dict[int, int] = {}  # process -> bytes shared with others; bound: the workers
        self._children = 0  # bytes of children that are neither workers nor sandboxes, such as an install

    def read(self, census: FleetCensus) -> int:
        """Return the bytes in use; pages that several processes share count once."""
        pids = (self._me, *census.pids)
        resident = read_resident(pids)
        if self._looks % SHARES_EVERY == 0:
            self._shared = {pid: max(0, resident[pid] - share) for pid, share in read_pss(pids).items()}
        if self._looks % CHILDREN_EVERY == 0:
            self._children = self._other_children(set(census.pids))
        self._looks += 1
        self.base = sum(use - self._shared.get(pid, 0) for pid, use in resident.items())
        return self.base + census.sandboxes + self._children

    def _other_children(self, workers: set[int]) -> int:
        """Return the bytes of children beside workers; 0 without workers: sandboxes are children then."""
        others = list_children(self._me) - workers if workers else set()
        return sum(read_tree_memory(others).values()) if others else 0


class RunUsage:
    """The latest reading of one run. `AttemptLeases` grants by it, `MemoryControl` renews it."""

    def __init__(self, meter: ResourceMeter, footprint: MemoryFootprint | None = None) -> None:
        self._meter = meter
        self._footprint = footprint or MemoryFootprint()
        self._lag = 0.0
        self.census = FleetCensus(workers=0)
        self.own_memory = self._footprint.read(self.census)
        self.reading = meter.read(self.own_memory)
        self._read_at = time.monotonic()

    @property
    def base(self) -> int:
        """Bytes of conductor and workers."""
        return self._footprint.base

    @property
    def memory_uses(self) -> dict[int, int]:
        """Bytes of memory by attempt."""
        return {attempt: use.memory for attempt, use in self.census.uses.items()}

    @property
    def disk_uses(self) -> dict[int, int]:
        """Bytes of disk by attempt."""
        return {attempt: use.disk for attempt, use in self.census.uses.items()}

    def change(self, config: RunConfig) -> None:
        """Measure against the budget of this configuration from now on."""
        self._meter.change_budget(config.memory)

    def measure(self, census: FleetCensus) -> None:
        """Take a reading of everything."""
        self.census = census
        # Files in a scratch file system that is in memory are memory, too.
        in_memory = self.reading.disk("scratch").memory
        self.own_memory = self._footprint.read(census) + (sum(self.disk_uses.values()) if in_memory else 0)
        self.reading = self._meter.read(self.own_memory)
        self._read_at = time.monotonic()
        self._lag = max(self._lag, census.lag)

    def refresh(self) -> bool:
        """Read the bounds again: set-up or a neighbour may have taken memory; False if they are fresh."""
        if time.monotonic() - self._read_at < FRESH:
            return False
        self._read_at = time.monotonic()
        self.reading = self._meter.read(self.own_memory)
        return True

    def take_lag(self) -> float:
        """Return the longest lag of a worker since the last call, in seconds."""
        lag, self._lag = self._lag, 0.0
        return lag
