"""The planner's queues: samples and groups that wait for a slot, for a worker of their own, or for a time.

The queues decide which entry starts next. `plan.py` decides what enters and starts it.
"""

from __future__ import annotations

import heapq
from collections import deque

from .groups import Group
from .planner_state import STRAGGLER_CUT, WHOLE_GROUP, PlannerState, QueueKey


class SampleQueues:
    """The queues of one planner, over its state. `save` writes them back before the state is encoded."""

    def __init__(self, state: PlannerState) -> None:
        self._state = state
        self._alone = deque(state.alone)  # bound: as `PlannerState.open`
        self.ready = deque(state.ready)  # bound: as `PlannerState.open`
        self.members = deque(state.members)  # bound: as `PlannerState.open`

    def save(self) -> None:
        state = self._state
        state.ready, state.alone, state.members = list(self.ready), list(self._alone), list(self.members)

    def count_waiting(self) -> dict[str, int]:
        """Count the queued samples, by the reason for their wait."""
        counts = {
            "slot": sum(map(self._state.count_slots, self.ready)),
            "a worker of its own": sum(map(self._state.count_slots, self._alone)),
            "back-off": sum(1 for _, key in self._state.delayed if key[1] != STRAGGLER_CUT),
        }
        return {why: count for why, count in counts.items() if count}

    def add(self, key: QueueKey, *, first: bool = False) -> None:
        """Queue a sample; a member of a group that has not started waits for the whole group."""
        sample = self._state.open[key]
        if (group := self._state.group_of(key)) is not None:
            group.mark_waiting(sample.sample)
            if group.started:
                self.members.append(key)
            else:
                self.add_group(group)
            return
        queue = self._alone if sample.losses >= self._state.policy.losses_before_alone else self.ready
        if first:
            queue.appendleft(key)
        else:
            queue.append(key)

    def add_group(self, group: Group) -> None:
        """Queue a complete group until there are slots for all of its members."""
        if group.complete and not group.started and not group.queued and group.needed_slots:
            group.queued = True
            (self._alone if self._state.is_suspect(group) else self.ready).append((group.id, WHOLE_GROUP))

    def delay(self, key: QueueKey, until: float) -> None:
        heapq.heappush(self._state.delayed, (until, key))

    def pop_due(self, at: float) -> tuple[float, QueueKey] | None:
        """Return the first delayed entry whose time has come, with that time."""
        delayed = self._state.delayed
        return heapq.heappop(delayed) if delayed and delayed[0][0] <= at else None

    def pop_ready(self) -> tuple[QueueKey, bool] | None:
        """Return the entry that can start now, and whether it needs a worker of its own.

        No sample overtakes a group that waits for enough slots.
        """
        free = self._state.free_slots
        suspect = self._alone and self._state.running_alone < self._state.policy.alone_at_once
        if suspect and self._state.count_slots(self._alone[0]) <= free:
            return self._alone.popleft(), True
        if self.ready and self._state.count_slots(self.ready[0]) <= free:
            return self.ready.popleft(), False
        return None

    def remove(self, key: QueueKey) -> None:
        for queue in (self.ready, self._alone, self.members):
            if key in queue:
                queue.remove(key)
        self._state.delayed = [entry for entry in self._state.delayed if entry[1] != key]
        heapq.heapify(self._state.delayed)
