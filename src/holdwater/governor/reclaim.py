"""What is done when memory runs short, one step after another, and when it is over. Pure.

Trim a quiet worker; admit nobody; drain the fattest worker; preempt the youngest attempt. Each step is given
time to work before the next one, and admission begins again well below where it stopped.
"""

from __future__ import annotations

from enum import StrEnum

HIGH = 0.94  # of the limit, all that is ever leased: nobody is admitted any more
LOW = 0.90  # below it, they are again
CRITICAL = 0.97  # steps follow fast
PATIENCE = 8  # readings that a step gets to work
HASTE = 3  # the same, when it is critical


class Action(StrEnum):
    """A step; each is tried before the next."""

    TRIM = "trim"
    RECYCLE = "recycle"
    PREEMPT = "preempt"


STEPS = (Action.TRIM, Action.RECYCLE, Action.PREEMPT)


class Reclaim:
    """Remembers which step was taken last, and how long ago."""

    def __init__(self) -> None:
        self.holding = False
        self._step = 0
        self._since = 0

    def next(self, used: int, limit: int) -> Action | None:
        """The step to take now, given a reading of the tightest bound."""
        share = used / limit if limit else 1.0
        if share < LOW:
            self.holding, self._step, self._since = False, 0, 0
            return None
        if share < HIGH:
            return None  # neither begins nor ends here
        begins = not self.holding
        self.holding = True
        self._since += 1
        if not begins and self._since < (HASTE if share >= CRITICAL else PATIENCE):
            return None
        action = STEPS[min(self._step, len(STEPS) - 1)]
        self._step, self._since = self._step + 1, 0
        return action
