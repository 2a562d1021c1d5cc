"""The health of one endpoint: its failures, and the time until which it rests.

It knows nothing of other endpoints: see `endpoint_choice.py`. Time is an argument, in seconds of the loop.
"""

from __future__ import annotations

import math
import random

from ...core.endpoints import EndpointState, EndpointUse
from ...core.failures import double_delay
from .retry import CircuitBreaker

FIRST_REST = 1.0  # seconds; doubles with each failed trial
LONGEST_REST = 30.0
ATTEMPTS = 2  # number of different attempts whose calls fail before conversations leave


class EndpointHealth:
    """After a failure, new conversations avoid the endpoint while it rests; then one call tries it."""

    def __init__(self) -> None:
        self.forget_placed()
        self._breaker = CircuitBreaker(ATTEMPTS, 0.0)
        self._state = EndpointState.OK
        self._error = ""
        self._requests = self._failures = 0  # since the last report
        self._rests = 0  # in succession
        self._rested_at = -math.inf
        self._until = -math.inf
        self._on_trial = False

    @property
    def state(self) -> EndpointState:
        return self._state

    def forget_placed(self) -> None:
        """Count anew, from a random fraction: each worker begins with another server."""
        self.placed = random.random()

    def takes_new(self, now: float) -> bool:
        """Whether new conversations may begin here."""
        if self._state is EndpointState.OK:
            return now >= self._until
        return now >= self._until and not self._on_trial

    def keeps_old(self, now: float) -> bool:
        """Whether a conversation stays here."""
        return self._state is not EndpointState.DOWN or self.takes_new(now)

    def enter(self) -> None:
        """Record a call that is about to be sent; pair it with `leave`."""
        self._requests += 1
        self._on_trial = self._state is not EndpointState.OK

    def leave(self) -> None:
        self._on_trial = False

    def record_success(self) -> bool:
        """Record a complete answer; return whether the state changed."""
        self._breaker.record_success()
        self._rests, self._error = 0, ""
        return self._change_state(EndpointState.OK)

    def record_refusal(self, until: float) -> None:
        """Record a rate limit that ends at `until`: it is no failure."""
        self._until = max(self._until, until)

    def record_failure(self, attempt: int, error: str, entered: float, now: float, *, certain: bool) -> bool:
        """Record the failure of a call that entered at `entered`; return whether the state changed.

        A certain failure concerns every call. Failures of one burst lengthen the rest once.
        """
        self._failures += 1
        self._error = error
        if entered >= self._rested_at:
            self._rests, self._rested_at = self._rests + 1, now
            self._until = max(self._until, now + double_delay(FIRST_REST, self._rests, LONGEST_REST))
        down = self._breaker.record_failure(attempt, now) or certain or self._state is EndpointState.DOWN
        return self._change_state(EndpointState.DOWN if down else EndpointState.DOUBTFUL)

    def report_use(self, url: str) -> EndpointUse:
        """Return the calls since the last report."""
        requests, failures = self._requests, self._failures
        self._requests = self._failures = 0
        return EndpointUse(
            url=url, requests=requests, failures=failures, state=self._state, error=self._error
        )

    def _change_state(self, state: EndpointState) -> bool:
        changed, self._state = self._state is not state, state
        return changed
