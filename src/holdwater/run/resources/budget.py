"""Stops a run whose budget is used up, and finds attempts whose own time is used up, each second.

`core/prices.py` defines budgets. Attempts that still run are interrupted, and the run can be resumed. Workers
enforce the limits of an attempt themselves; `AttemptDeadlines` catches workers that do not.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.config import CriticKind, RunConfig
from ...core.errors import RunStopped
from ...core.prices import RunBudget
from ...core.records import Attempt, LimitOverrides
from ...ledger.ledger import Ledger
from ...rollout.process_health import PausableClock, RunningClock
from ...rollout.scope import CANCEL_SECONDS
from ..fleet.interface import Fleet

HINT = "continue with `holdwater resume` and a larger budget"
CLOSES = 3  # resources that an attempt closes one after another
MORE_CLOSES = 3  # for a member of a group: its membership, its children, the scoring session


class BudgetWatch:
    """Watches the use of a run's budget over all conductors that the run had."""

    def __init__(self, config: RunConfig, ledger: Ledger, clock: Callable[[], float]) -> None:
        """`clock` stands still while the run is paused."""
        self._budget: RunBudget = config.budget
        self._config = config
        self._ledger = ledger
        self._clock = clock
        self._began = self._clock()
        self._before = 0.0  # seconds that earlier conductors spent

    def change(self, config: RunConfig) -> None:
        """Apply the budget of this configuration from now on."""
        self._budget = config.budget

    async def begin(self) -> None:
        """Raise `RunStopped` if work is left and the budget is used up."""
        self._before = await self._ledger.earlier_seconds()
        counts = await self._ledger.counts()
        over = self._budget.find_used_up(counts.usage, self._seconds)
        if over is not None and counts.settled < counts.samples(self._config):
            raise RunStopped(over, HINT)

    async def look(self, fleet: Fleet, stop: Callable[[RunStopped], None]) -> None:
        """Stop the run when its budget is used up."""
        settled = (await self._ledger.counts()).usage
        # In this order, an attempt that settles meanwhile is missed once, but never counted twice.
        over = self._budget.find_used_up(settled.plus(fleet.take_census().usage), self._seconds)
        if over is not None:
            stop(RunStopped(over, HINT))

    @property
    def _seconds(self) -> float:
        return self._before + self._clock() - self._began


class AttemptDeadlines:
    """The deadlines of the running attempts."""

    def __init__(self, config: RunConfig, pauses: PausableClock) -> None:
        """The time of attempts stands still while `pauses` does."""
        self._config = config
        self._clock = RunningClock(pauses.time)
        self._due: dict[int, float] = {}  # bound: the run's concurrency
        self._scoring: dict[int, float] = {}  # seconds that scoring may take; bound: the same

    def change(self, config: RunConfig) -> None:
        """Apply the limits of this configuration to attempts that begin from now on."""
        self._config = config

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
