"""When a call is tried again, how long to wait first, and what a failed one means. Decides, does nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from ...core.records import Failure, Where

AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
RATE_LIMITED = frozenset({429, 503, 529})  # waiting for these does not count as work
LONGEST_WAIT = 300.0  # seconds; an upstream that asks for more is left to the run's own retries
FIRST_WAIT = 0.5
LONGEST_BACKOFF = 30.0
LONGEST_MESSAGE = 2000

# What providers call it, in whichever field of the error.
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
_POOR = "credit balance is too low"  # Anthropic's, in a 400


def delay(tried: int, headers: Mapping[str, str], body: bytes = b"") -> float:
    """Seconds before the next try after `tried` failed ones: what is asked for, or back-off with jitter."""
    asked = asked_for(headers, body)
    if asked is not None:
        return asked + random.uniform(0, min(1.0, asked / 10))
    return float(min(LONGEST_BACKOFF, FIRST_WAIT * 2 ** (tried - 1)) * random.uniform(0.5, 1.0))


def asked_for(headers: Mapping[str, str], body: bytes) -> float | None:
    """The seconds that an answer asks to wait: `Retry-After`, or what Google writes into the error."""
    seconds = retry_after(headers)
    return error_in(body).after if seconds is None else seconds


def retry_after(headers: Mapping[str, str]) -> float | None:
    """`Retry-After` in seconds, from either form; None where there is none that makes sense."""
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


def failure_of(status: int, headers: Mapping[str, str], body: bytes) -> Failure | None:
    """What an answer with this status means for the attempt; None for a success."""
    if status < 300:
        return None
    error = error_in(body)
    message = f"the upstream answered {status}: {error.message or 'no message'}"[:LONGEST_MESSAGE]
    named = error.names
    if (shared := _of_run(status, named, message)) is not None:
        return shared
    overloaded = status in AGAIN or status >= 500 or bool(named & _OVERLOADED)
    if overloaded and (status == 429 or not named & _INVALID):
        kind = "429" if status == 429 else "5xx"
        after = asked_for(headers, body) or 0.0
        return Failure(where=Where.MODEL, kind=kind, message=message, after=after)
    return Failure(where=Where.MODEL, kind="invalid", message=message, again=False)


def failure_inside(error: Any) -> Failure:
    """What an error inside a 200 means for the attempt."""
    found = error_of(error)
    what = found.message or "an error without a message"
    message = f"the upstream failed inside its reply: {what}"[:LONGEST_MESSAGE]
    if (shared := _of_run(200, found.names, message)) is not None:
        return shared
    if found.names & _INVALID:
        return Failure(where=Where.MODEL, kind="invalid", message=message, again=False)
    return Failure(where=Where.MODEL, kind="error", message=message)


def _of_run(status: int, named: set[str], message: str) -> Failure | None:
    """A failure that every instance would have."""
    if status == 402 or named & _QUOTA or _POOR in message:
        kind, hint = "quota", "top up the account that the upstream's key belongs to"
    elif status in (401, 403) or named & _KEY:
        kind, hint = "key", "check the upstream's API key and what it may use"
    elif status == 404 or named & _MODEL:
        kind, hint = "model", "check the model's name and the upstream's base URL"
    else:
        return None
    return Failure(where=Where.RUN, kind=kind, message=message, hint=hint, again=False)


class ErrorText(msgspec.Struct):
    """The part of an error that people and programs read."""

    message: str = ""
    type: str = ""
    code: str = ""
    reason: str = ""
    after: float | None = None  # seconds to wait

    @property
    def names(self) -> set[str]:
        """What the upstream calls it."""
        return {self.code, self.type, self.reason}


def error_in(body: bytes) -> ErrorText:
    """The error in a JSON body of any upstream's making; an empty one where there is none."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ErrorText(body[:LONGEST_MESSAGE].decode(errors="replace").strip())
    if isinstance(document, list) and document:
        document = document[0]  # Google's, in answer to a call for a stream
    return error_of(document.get("error", document)) if isinstance(document, dict) else ErrorText()


def error_of(error: Any) -> ErrorText:
    """The text of a decoded error, whatever its shape."""
    if isinstance(error, dict):
        text = error.get("message") or error.get("detail") or ""
        kind = error.get("type") or error.get("status")
        reason, after = _details(error.get("details"))
        return ErrorText(_text(text), _text(kind), _text(error.get("code")), reason, after)
    return ErrorText(_text(error))


def _details(details: Any) -> tuple[str, float | None]:
    """The reason and the delay that Google puts beside an error."""
    reason, after = "", None
    for detail in details if isinstance(details, list) else ():
        if isinstance(detail, dict):
            reason = _text(detail.get("reason")) or reason
            after = _seconds(detail.get("retryDelay"), after)
    return reason, after


def _seconds(text: Any, otherwise: float | None) -> float | None:
    try:
        seconds = float(text.removesuffix("s")) if isinstance(text, str) else math.nan
    except ValueError:
        return otherwise
    return max(0.0, seconds) if math.isfinite(seconds) else otherwise


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)
