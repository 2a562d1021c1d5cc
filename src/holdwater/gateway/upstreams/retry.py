"""Decides whether and when a call is retried, and which failure an error means. It sends nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from ...core.records import AttemptFailure, FailureOrigin

RETRIED_STATUSES = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
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


def choose_delay(tried: int, headers: Mapping[str, str], body: bytes = b"") -> float:
    """Return the seconds to wait after `tried` failures: the requested delay, or jittered back-off."""
    asked = read_delay(headers, body)
    if asked is not None:
        return asked + random.uniform(0, min(1.0, asked / 10))
    return float(min(LONGEST_BACKOFF, FIRST_WAIT * 2 ** (tried - 1)) * random.uniform(0.5, 1.0))


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
