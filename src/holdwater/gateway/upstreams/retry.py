"""Decides whether and when a call is sent or retried, and which failure an error means. It sends nothing.

A gate limits concurrent calls once the upstream reports overload. A breaker stops the run when every call of
several attempts fails for a while: otherwise every instance attempted meanwhile would be lost to one cause.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from ...core.errors import ModelFailed
from ...core.failures import double_delay
from ...core.records import AttemptFailure, FailureOrigin

ATTEMPTS = 5  # number of different attempts whose calls all failed
SECONDS = 30.0  # during which no call succeeded
HINT = "check the upstream, then run `holdwater resume`"
RETRIED_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
ABSENT = frozenset({404, 405, 501})  # a server answers these for a path that it does not have
RATE_LIMITED = frozenset({429, 503, 529})  # waiting after these does not count as working time
LONGEST_WAIT = 300.0  # seconds; for a longer delay, the run retries the attempt instead
FIRST_WAIT = 0.5
LONGEST_BACKOFF = 30.0
LONGEST_MESSAGE = 2000
# The providers' names for errors, in any field of the error.
_QUOTA = {
    "insufficient_quota",
    "billing_error",
    "billing_not_active",
    "billing_hard_limit_reached",
    "quota_exceeded",
}
_KEY = {"invalid_api_key", "authentication_error", "permission_error", "API_KEY_INVALID", "UNAUTHENTICATED"}
_MODEL = {"model_not_found", "not_found_error"}
_OVERLOADED = {
    "overloaded_error",
    "rate_limit_error",
    "rate_limit_exceeded",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
}
_INVALID = {
    "invalid_request_error",
    "request_too_large",
    "context_length_exceeded",
    "INVALID_ARGUMENT",
    "BadRequestError",
}
_LOW_CREDIT = "credit balance is too low"  # Anthropic's, in a 400


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


WaitContext = Callable[[], AbstractContextManager[None]]


class UpstreamGate:
    """First come, first served. Pair `enter` with `leave`, and record the result in between."""

    def __init__(self) -> None:
        self.limit = math.inf
        self.inside = 0
        self._cut_at = -math.inf  # time when the limit was last lowered
        self._successes = 0
        self._line: deque[asyncio.Future[None]] = deque()  # bound: the calls in flight

    @property
    def outstanding(self) -> int:
        """The number of calls inside or in line."""
        return self.inside + len(self._line)

    @property
    def is_full(self) -> bool:
        """Whether the next call has to wait."""
        return bool(self._line) or self.inside >= self.limit

    async def enter(self, waiting: WaitContext) -> float:
        """Wait for admission; return the time of entry."""
        if self.is_full:
            with waiting():
                await self._wait()
        else:
            self.inside += 1
        return asyncio.get_running_loop().time()

    async def _wait(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.leave()  # the call was already admitted
            else:
                self._line.remove(turn)
            raise

    def leave(self) -> None:
        self.inside -= 1
        self._admit()

    def record_refusal(self, entered: float) -> None:
        """Record a refusal of a call that entered at `entered`. One burst lowers the limit once."""
        if entered > self._cut_at:
            self._cut_at = asyncio.get_running_loop().time()
            self.limit = max(1, min(self.limit, self.inside) // 2)
            self._successes = 0

    def record_success(self) -> None:
        """Record an answered call."""
        if self.limit is not math.inf:
            self._successes += 1
            if self._successes >= self.limit:
                self._successes = 0
                self.limit += 1
                self._admit()

    def _admit(self) -> None:
        while self._line and self.inside < self.limit:
            turn = self._line.popleft()
            if not turn.done():
                self.inside += 1
                turn.set_result(None)


def choose_delay(tried: int, headers: Mapping[str, str], body: bytes = b"") -> float:
    """Return the seconds to wait after `tried` failures: the requested delay, or jittered back-off."""
    asked = read_delay(headers, body)
    if asked is not None:
        return asked + random.uniform(0, min(1.0, asked / 10))
    return double_delay(FIRST_WAIT, tried, LONGEST_BACKOFF) * random.uniform(0.5, 1.0)


def read_delay(headers: Mapping[str, str], body: bytes) -> float | None:
    """Return the delay in seconds that an answer requests: `Retry-After`, or Google's field in the error."""
    seconds = parse_retry_after(headers)
    return parse_error(body).after if seconds is None else seconds


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return `Retry-After` in seconds, from either form; None if it is missing or invalid."""
    text = headers.get("Retry-After", "").strip()
    try:
        seconds = float(text)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    except ValueError:
        pass  # not a number: it may be a date
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def failure_of(status: int, headers: Mapping[str, str], body: bytes) -> AttemptFailure | None:
    """Return the failure that an answer with this status means for the attempt; None for a success."""
    if status < 300:
        return None
    error = parse_error(body)
    message = f"the upstream answered {status}: {error.message or 'no message'}"[:LONGEST_MESSAGE]
    named = error.names
    if (shared := _judge_run_failure(status, named, message)) is not None:
        return shared
    overloaded = status in RETRIED_STATUSES or status >= 500 or bool(named & _OVERLOADED)
    if overloaded and (status == 429 or not named & _INVALID):
        kind = "429" if status == 429 else "5xx"
        after = read_delay(headers, body) or 0.0
        return AttemptFailure(where=FailureOrigin.MODEL, kind=kind, message=message, after=after)
    return AttemptFailure(where=FailureOrigin.MODEL, kind="invalid", message=message, again=False)


def failure_inside(error: Any) -> AttemptFailure:
    """Return the failure that an error inside a 200 means for the attempt."""
    found = read_error(error)
    what = found.message or "an error without a message"
    message = f"the upstream's reply contains an error: {what}"[:LONGEST_MESSAGE]
    if (shared := _judge_run_failure(200, found.names, message)) is not None:
        return shared
    if found.names & _INVALID:
        return AttemptFailure(where=FailureOrigin.MODEL, kind="invalid", message=message, again=False)
    return AttemptFailure(where=FailureOrigin.MODEL, kind="error", message=message)


def _judge_run_failure(status: int, named: set[str], message: str) -> AttemptFailure | None:
    """Return a failure that every instance would have; None for any other."""
    if status == 402 or named & _QUOTA or _LOW_CREDIT in message:
        kind, hint = "quota", "top up the account that the upstream's key belongs to"
    elif status in (401, 403) or named & _KEY:
        kind, hint = "key", "check the upstream's API key and what it may use"
    elif status == 404 or named & _MODEL:
        kind, hint = "model", "check the model's name and the upstream's base URL"
    else:
        return None
    return AttemptFailure(where=FailureOrigin.RUN, kind=kind, message=message, hint=hint, again=False)


class ErrorText(msgspec.Struct):
    """The readable part of an error: its message and its codes."""

    message: str = ""
    type: str = ""
    code: str = ""
    reason: str = ""
    after: float | None = None  # seconds to wait

    @property
    def names(self) -> set[str]:
        """The upstream's names for the error."""
        return {self.code, self.type, self.reason}


def parse_error(body: bytes) -> ErrorText:
    """Return the error in a JSON body of any upstream; an empty one if there is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ErrorText(body[:LONGEST_MESSAGE].decode(errors="replace").strip())
    if isinstance(document, list) and document:
        document = document[0]  # Google's form of an error for a stream
    return read_error(document.get("error", document)) if isinstance(document, dict) else ErrorText()


def read_error(error: Any) -> ErrorText:
    """Return the text of a decoded error of any shape."""
    if isinstance(error, dict):
        text = error.get("message") or error.get("detail") or ""
        kind = error.get("type") or error.get("status")
        reason, after = _parse_details(error.get("details"))
        return ErrorText(_to_text(text), _to_text(kind), _to_text(error.get("code")), reason, after)
    return ErrorText(_to_text(error))


def _parse_details(details: Any) -> tuple[str, float | None]:
    """Return the reason and the delay that Google puts into the details of an error."""
    reason, after = "", None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict):
            reason = _to_text(detail.get("reason")) or reason
            after = _parse_seconds(detail.get("retryDelay"), after)
    return reason, after


def _parse_seconds(text: Any, otherwise: float | None) -> float | None:
    try:
        seconds = float(text.removesuffix("s")) if isinstance(text, str) else math.nan
    except ValueError:
        return otherwise
    return max(0.0, seconds) if math.isfinite(seconds) else otherwise


def _to_text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)
