"""Classify the refusals of a registry: missing, denied, rate, digest, unsupported, or an error of its own.

A refusal counts as `missing` only if the registry's own error code says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import msgspec

from ...core.errors import ImageFailed

LARGEST_ERROR = 16 * 1024  # bytes of a refusal's body to read
_LONGEST_CAUSE = 300
_ABSENT = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN", "NOT_FOUND"})  # Harbor sends the last one
_ABSENT_BLOB = frozenset({"BLOB_UNKNOWN", *_ABSENT})
_DIGEST = frozenset({"DIGEST_INVALID", "SIZE_INVALID"})
_UNSUPPORTED = frozenset({"UNSUPPORTED", "MANIFEST_INVALID"})
_STALE = frozenset(  # states that a retry may find changed
    {"BLOB_UNKNOWN", "MANIFEST_BLOB_UNKNOWN", "BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID", "RANGE_INVALID"}
)
_QUERY = re.compile(r"\?[^\s'\"]+")


class RegistryRefusal(ImageFailed):
    """An `ImageFailed` with the registry's status and error code."""

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        kind: str = "registry",
        again: bool | None = None,
        after: float = 0.0,
        status: int = 0,
        code: str = "",
    ) -> None:
        super().__init__(message, hint, kind=kind, again=again, after=after)
        self.status = status
        self.code = code
        self.spent = False  # the retry policy allows no more attempts

    @property
    def absent_blob(self) -> bool:
        return self.status == 404 and self.code in _ABSENT_BLOB


def parse_refusal(what: str, status: int, headers: Mapping[str, str], body: bytes) -> RegistryRefusal:
    """Return the error for a refused request; `what` begins it: `the manifest of ... cannot be read`."""
    code, told = _parse_error(body)
    cause = sanitize_line(" ".join(filter(None, (str(status), code, told))))
    kind, again = _classify(status, code)
    after = parse_retry_after(headers, time.time()) or 0.0
    hint = "log in with `docker login`, or request access" if kind == "denied" else ""
    return RegistryRefusal(
        f"{what}: {cause}", hint, kind=kind, again=again, after=after, status=status, code=code
    )


def unreached_error(what: str, cause: str, *, again: bool = True, hint: str = "") -> RegistryRefusal:
    """Return the error for a missing or incomplete response."""
    return RegistryRefusal(f"{what}: {sanitize_line(cause)}", hint, kind="registry", again=again)


def mismatch_error(what: str, found: str) -> RegistryRefusal:
    """Return the error for content that does not match its size or digest."""
    return RegistryRefusal(f"{what}: {found}", kind="digest", again=True)


def unsupported_error(what: str, why: str, hint: str = "") -> RegistryRefusal:
    return RegistryRefusal(f"{what}: {why}", hint, kind="unsupported", again=False)


def parse_retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds of `Retry-After`, a number or a date; `now` is in seconds since the epoch."""
    value = headers.get("Retry-After", "").strip()
    if not value:
        return None
    try:
        return max(0.0, float(value)) if float(value) < 1e9 else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def sanitize_line(text: str) -> str:
    """Return external text on one short line, without the queries of URLs, which may be secret."""
    line = "".join(c if c.isprintable() else " " for c in _QUERY.sub("?...", text))
    return line[:_LONGEST_CAUSE] + ("..." if len(line) > _LONGEST_CAUSE else "")


def _classify(status: int, code: str) -> tuple[str, bool]:
    if status == 429 or code == "TOOMANYREQUESTS":
        return "rate", True
    if status in (401, 403):
        return "denied", False
    if status == 404 and code in _ABSENT:
        return "missing", False
    if code in _DIGEST:
        return "digest", True
    if code in _UNSUPPORTED or status in (405, 415):
        return "unsupported", False
    return "registry", status >= 500 or status in (404, 408, 416) or code in _STALE


def _parse_error(body: bytes) -> tuple[str, str]:
    """Return the first error's code and message; the beginning of the text if it is not a registry's JSON."""
    try:
        error = msgspec.json.decode(body)["errors"][0]
        detail = error.get("message") or error.get("detail") or ""
        return str(error.get("code", "")).upper(), str(detail)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return "", body[:_LONGEST_CAUSE].decode(errors="replace").strip()
