"""Computes when an attempt must be over by its own limits; an attempt past that time hangs.

Workers enforce the limits themselves; this catches workers that do not.
"""

from __future__ import annotations

from ...core.config import CriticKind, RunConfig
from ...core.records import Attempt, LimitOverrides
from ...rollout.process_health import RunningClock
from ...rollout.scope import CANCEL_SECONDS

CLOSES = 3  # resources that an attempt closes one after another
MORE_CLOSES = 3  # for a member of a group: its membership, its children, the scoring session


class AttemptDeadlines:
    """The deadlines of the running attempts."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._clock = RunningClock()
        self._due: dict[int, float] = {}  # bound: the run's concurrency
        self._scoring: dict[int, float] = {}  # seconds that scoring may take; bound: the same

    def begin(self, attempt: Attempt, asks: LimitOverrides) -> None:
        """Start the attempt's time: a worker has it."""
        closing = self._closing(CLOSES if attempt.group is None else CLOSES + MORE_CLOSES)
        config, limits = self._config, self._config.limits.with_overrides(asks)
        # A custom critic gets the same time again.
        asked = limits.grading if config.critic not in tuple(CriticKind) else 0.0
        starts = 2 * limits.setup  # a sandbox may be started again before grading
        phases = starts + limits.acting + config.salvaging + limits.grading + asked
        self._due[attempt.id] = self._clock.time() + phases + closing
        self._scoring[attempt.id] = limits.grading + closing

    def pause(self, attempt: int) -> None:
        """Stop the attempt's time while it waits for its group, which is not its own fault."""
        self._due.pop(attempt, None)

    def begin_scoring(self, attempt: int) -> None:
        """Start the time for scoring its group."""
        if attempt in self._scoring:
            self._due[attempt] = self._clock.time() + self._scoring[attempt]

    def end(self, attempt: int) -> None:
        self._due.pop(attempt, None)
        self._scoring.pop(attempt, None)

    def take_overdue(self) -> list[int]:
        """Return attempts past their deadline, each once. To be called once a second."""
        self._clock.tick()
        now = self._clock.time()
        late = [attempt for attempt, due in self._due.items() if due < now]
        for attempt in late:
            self.end(attempt)
        return late

    def _closing(self, closes: int) -> float:
        """Return a generous number of seconds for closing the attempt's resources."""
        return closes * (self._config.closing + CANCEL_SECONDS) + self._config.patience
