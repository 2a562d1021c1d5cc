"""What the processes of a run use together: conductor, workers, sandboxes, and whatever set-up has started.

Cheap enough for every look: what is dear is read rarely, and the last reading stands until then.
"""

from __future__ import annotations

import os

from ..governor.processes import children_of, pss_of, use_of, use_of_trees
from .fleet import Census

CHILDREN_EVERY = 5  # looks: a pass over all processes of the machine, if there are any
SHARES_EVERY = 150  # looks: 1 ms a process


class Footprint:
    """One conductor's."""

    def __init__(self) -> None:
        self._me = os.getpid()
        self._looks = 0
        self.base = 0  # bytes of conductor and workers at the last reading
        self._shared: dict[int, int] = {}  # process -> bytes that others have as well; bound: the workers
        self._children = 0  # bytes of children that are neither workers nor sandboxes, such as an install

    def read(self, census: Census) -> int:
        """Bytes in use, with pages that several processes share counted once."""
        pids = (self._me, *census.pids)
        resident = use_of(pids)
        if self._looks % SHARES_EVERY == 0:
            self._shared = {pid: max(0, resident[pid] - share) for pid, share in pss_of(pids).items()}
        if self._looks % CHILDREN_EVERY == 0:
            self._children = self._other_children(set(census.pids))
        self._looks += 1
        self.base = sum(use - self._shared.get(pid, 0) for pid, use in resident.items())
        return self.base + census.sandboxes + self._children

    def _other_children(self, workers: set[int]) -> int:
        """Bytes of what was started here and is no worker. Without workers, sandboxes are children too."""
        others = children_of(self._me) - workers if workers else set()
        return sum(use_of_trees(others).values()) if others else 0
