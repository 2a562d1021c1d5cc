"""Selects the next action when memory runs short, and ends the shortage when it is over. Pure.

The sequence is: trim a quiet worker, stop admission, drain the largest worker, preempt the youngest
attempt. Each step has time to take effect before the next one. Admission resumes well below the level at
which it stopped.
"""

from __future__ import annotations

from enum import StrEnum

HIGH = 0.94  # share of the limit, the most that is ever leased: admission stops here
LOW = 0.90  # admission resumes below this
CRITICAL = 0.97  # steps follow each other fast above this
PATIENCE = 8  # readings that a step has to take effect
HASTE = 3  # the same above `CRITICAL`


class ReclaimAction(StrEnum):
    """A step; the steps are tried in this order."""

    TRIM = "trim"
    RECYCLE = "recycle"
    PREEMPT = "preempt"


STEPS = (ReclaimAction.TRIM, ReclaimAction.RECYCLE, ReclaimAction.PREEMPT)


class ReclaimSteps:
    """Tracks the last step and the readings since."""

    def __init__(self) -> None:
        self.holding = False
        self._step = 0
        self._since = 0

    def next(self, used: int, limit: int) -> ReclaimAction | None:
        """Return the step to take now, given a reading of the tightest bound; None: wait."""
        share = used / limit if limit else 1.0
        if share < LOW:
            self.holding, self._step, self._since = False, 0, 0
            return None
        if share < HIGH:
            return None  # between the thresholds the state stays the same
        begins = not self.holding
        self.holding = True
        self._since += 1
        if not begins and self._since < (HASTE if share >= CRITICAL else PATIENCE):
            return None
        action = STEPS[min(self._step, len(STEPS) - 1)]
        self._step, self._since = self._step + 1, 0
        return action
