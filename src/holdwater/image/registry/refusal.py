"""What a registry's refusal means: missing, denied, rate, digest, unsupported, or trouble of its own.

A refusal counts as `missing` only where the registry says in its own words that there is no such thing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime

import msgspec

from ...core.errors import ImageFailed

LARGEST_ERROR = 16 * 1024  # bytes of a refusal that are read
_LONGEST_CAUSE = 300
_ABSENT = frozenset({"MANIFEST_UNKNOWN", "NAME_UNKNOWN", "NOT_FOUND"})  # the last one is Harbor's
_ABSENT_BLOB = frozenset({"BLOB_UNKNOWN", *_ABSENT})
_DIGEST = frozenset({"DIGEST_INVALID", "SIZE_INVALID"})
_UNSUPPORTED = frozenset({"UNSUPPORTED", "MANIFEST_INVALID"})
_STALE = frozenset(  # what another try may find otherwise
    {"BLOB_UNKNOWN", "MANIFEST_BLOB_UNKNOWN", "BLOB_UPLOAD_UNKNOWN", "BLOB_UPLOAD_INVALID", "RANGE_INVALID"}
)
_QUERY = re.compile(r"\?[^\s'\"]+")


class Refusal(ImageFailed):
    """An `ImageFailed` that knows the registry's own words for it."""

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
        self.spent = False  # it was tried as often as patience allows

    @property
    def absent_blob(self) -> bool:
        return self.status == 404 and self.code in _ABSENT_BLOB


def refusal(what: str, status: int, headers: Mapping[str, str], body: bytes) -> Refusal:
    """What an answer with this status means for `what`, as in `the manifest of ... cannot be read`."""
    code, told = _words(body)
    cause = shown(" ".join(filter(None, (str(status), code, told))))
    kind, again = _judged(status, code)
    after = retry_after(headers, time.time()) or 0.0
    hint = "sign in with `docker login`, or ask for the right to it" if kind == "denied" else ""
    return Refusal(f"{what}: {cause}", hint, kind=kind, again=again, after=after, status=status, code=code)


def unreached(what: str, cause: str, *, again: bool = True, hint: str = "") -> Refusal:
    """No answer, or half of one."""
    return Refusal(f"{what}: {shown(cause)}", hint, kind="registry", again=again)


def mismatch(what: str, found: str) -> Refusal:
    """Bytes that are not those that were asked for."""
    return Refusal(f"{what}: {found}", kind="digest", again=True)


def unsupported(what: str, why: str, hint: str = "") -> Refusal:
    return Refusal(f"{what}: {why}", hint, kind="unsupported", again=False)


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that are asked for, as a number or as a date; `now` is in seconds since the epoch."""
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


def shown(text: str) -> str:
    """What came from outside, on one short line. The query of a URL may be a secret."""
    line = "".join(c if c.isprintable() else " " for c in _QUERY.sub("?...", text))
    return line[:_LONGEST_CAUSE] + ("..." if len(line) > _LONGEST_CAUSE else "")


def _judged(status: int, code: str) -> tuple[str, bool]:
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


def _words(body: bytes) -> tuple[str, str]:
    """The first error's code and message; the whole text where it is not a registry's."""
    try:
        error = msgspec.json.decode(body)["errors"][0]
        detail = error.get("message") or error.get("detail") or ""
        return str(error.get("code", "")).upper(), str(detail)
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError, RecursionError):
        return "", body[:_LONGEST_CAUSE].decode(errors="replace").strip()
