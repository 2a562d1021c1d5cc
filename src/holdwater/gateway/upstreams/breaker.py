"""A circuit breaker: when every call of several attempts fails for a while, the run stops.

Otherwise every instance attempted meanwhile would be lost to the same cause. This module only decides;
`http.py` acts on it.
"""

from __future__ import annotations

from ...core.errors import ModelFailed
from ...core.records import AttemptFailure, FailureOrigin

ATTEMPTS = 5  # number of different attempts whose calls all failed
SECONDS = 30.0  # during which no call succeeded
HINT = "check the upstream, then run `holdwater resume`"


class BreakerTripped(ModelFailed):
    """No attempt can reach the upstream."""

    where = FailureOrigin.RUN
    kind = "breaker"
    again = False


class CircuitBreaker:
    """Trips after failures of several attempts; any success resets it."""

    def __init__(self, attempts: int = ATTEMPTS, seconds: float = SECONDS) -> None:
        self._bounds = (attempts, seconds)
        self._failing: set[int] = set()  # bound: `attempts`
        self._since = 0.0

    def record_success(self) -> None:
        self._failing.clear()

    def record_failure(self, attempt: int, now: float) -> bool:
        """Record that a call of `attempt` has finally failed; return whether the breaker trips."""
        attempts, seconds = self._bounds
        if not self._failing:
            self._since = now
        if len(self._failing) < attempts:
            self._failing.add(attempt)
        return len(self._failing) >= attempts and now - self._since >= seconds

    def describe(self, now: float, last: str) -> str:
        return f"every model call has failed for {now - self._since:.0f} s; last error: {last}"


def make_trip_failure(message: str) -> AttemptFailure:
    return AttemptFailure(
        where=FailureOrigin.RUN, kind=BreakerTripped.kind, message=message, hint=HINT, again=False
    )
