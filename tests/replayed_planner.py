"""A planner that remembers its events, so that a twin can be built from them: both must be equal."""

from __future__ import annotations

import msgspec

from holdwater.core.events import AnyCommand, AnyEvent
from holdwater.core.plan import RunPlanner
from holdwater.core.policy import PlannerPolicy


class ReplayedPlanner(RunPlanner):
    def __init__(self, policy: PlannerPolicy, next_attempt: int = 1) -> None:
        super().__init__(policy, next_attempt)
        self._first = policy, next_attempt
        self._events: list[tuple[AnyEvent, float]] = []  # bound: the events of one test

    def handle(self, event: AnyEvent, at: float) -> list[AnyCommand]:
        self._events.append((event, at))
        return super().handle(event, at)

    def build_twin(self) -> ReplayedPlanner:
        """Return a planner that has handled the same events."""
        twin = ReplayedPlanner(*self._first)
        for event, at in self._events:
            twin.handle(event, at)
        return twin

    def encode(self) -> bytes:
        """Return the state and the queues as bytes."""
        queues = self._queues
        return msgspec.msgpack.encode(
            [self._state, list(queues.ready), list(queues._alone), list(queues.members)]
        )
