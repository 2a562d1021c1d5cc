"""Measures the memory of a run's processes: conductor, workers, sandboxes, and programs of set-up.

Cheap enough for every look: expensive values are read rarely, and the last reading is used until then.
"""

from __future__ import annotations

import os

from ...governor.processes import list_children, read_pss, read_resident, read_tree_memory
from ..fleet.interface import FleetCensus

CHILDREN_EVERY = 5  # looks: a pass over all processes of the machine, if there are any workers
SHARES_EVERY = 150  # looks: 1 ms per process


class MemoryFootprint:
    """The memory footprint of one conductor's run."""

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
