"""When nothing of an attempt can be running any more by its own limits: whoever is over that hangs.

The limits themselves are kept in the worker; this is for workers that do not.
"""

from __future__ import annotations

from ..core.config import Critic, RunConfig
from ..core.records import Ask, Attempt
from ..rollout.scope import CANCEL_SECONDS
from .running_clock import RunningClock

CLOSES = 3  # what an attempt closes one after another
MORE_CLOSES = 3  # of a member of a group: its place in it, its children, the session of those who score it


class Deadlines:
    """Of the attempts that run."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._clock = RunningClock()
        self._due: dict[int, float] = {}  # bound: the run's concurrency
        self._scoring: dict[int, float] = {}  # seconds that being scored may take; bound: the same

    def begin(self, attempt: Attempt, asks: Ask) -> None:
        """A worker has it."""
        closing = self._closing(CLOSES if attempt.group is None else CLOSES + MORE_CLOSES)
        config, limits = self._config, self._config.limits.under(asks)
        asked = limits.grading if config.critic not in tuple(Critic) else 0.0  # a critic has as long again
        starts = 2 * limits.setup  # a sandbox may be begun anew before it is graded in
        phases = starts + limits.acting + config.salvaging + limits.grading + asked
        self._due[attempt.id] = self._clock.time() + phases + closing
        self._scoring[attempt.id] = limits.grading + closing

    def wait(self, attempt: int) -> None:
        """It waits for its group: that is no fault of its own."""
        self._due.pop(attempt, None)

    def score(self, attempt: int) -> None:
        """Its group is being scored."""
        if attempt in self._scoring:
            self._due[attempt] = self._clock.time() + self._scoring[attempt]

    def end(self, attempt: int) -> None:
        self._due.pop(attempt, None)
        self._scoring.pop(attempt, None)

    def overdue(self) -> list[int]:
        """Those that hang; each is named once. Asked about once a second."""
        self._clock.tick()
        now = self._clock.time()
        late = [attempt for attempt, due in self._due.items() if due < now]
        for attempt in late:
            self.end(attempt)
        return late

    def _closing(self, closes: int) -> float:
        """Seconds for what an attempt closes, and more than enough."""
        return closes * (self._config.closing + CANCEL_SECONDS) + self._config.patience
