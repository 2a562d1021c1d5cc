"""A failure that all share: when every call of several attempts fails for a while, the run is stopped.

Each instance that was tried meanwhile would be lost to the same cause. It decides; `http.py` asks it.
"""

from __future__ import annotations

from ...core.errors import ModelFailed
from ...core.records import Failure, Where

ATTEMPTS = 5  # different ones whose calls all failed
SECONDS = 30.0  # during which no call succeeded
HINT = "look at the upstream, then `holdwater resume`"


class Tripped(ModelFailed):
    """No upstream for anybody."""

    where = Where.RUN
    kind = "breaker"
    again = False


class Breaker:
    """Closed by any success."""

    def __init__(self, attempts: int = ATTEMPTS, seconds: float = SECONDS) -> None:
        self._bounds = (attempts, seconds)
        self._failing: set[int] = set()  # bound: `attempts`
        self._since = 0.0

    def succeeded(self) -> None:
        self._failing.clear()

    def failed(self, attempt: int, now: float) -> bool:
        """A call of `attempt` has failed for good; is it everybody's failure by now?"""
        attempts, seconds = self._bounds
        if not self._failing:
            self._since = now
        if len(self._failing) < attempts:
            self._failing.add(attempt)
        return len(self._failing) >= attempts and now - self._since >= seconds

    def message(self, now: float, last: str) -> str:
        return f"every model call has failed for {now - self._since:.0f} s, the last one so: {last}"


def tripped(message: str) -> Failure:
    return Failure(where=Where.RUN, kind=Tripped.kind, message=message, hint=HINT, again=False)
