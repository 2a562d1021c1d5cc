"""What a daemon's or a build's words mean: full disk, rate limit, refusal, missing base, broken Dockerfile.

Pure. The daemon hands a registry's answers on as text, so it goes by the words that they are known by.
"""

from __future__ import annotations

import re

from ...core.errors import AttemptError, ImageFailed, ResourceExhausted
from ...core.failures import DISK

RATE_PAUSE = 30.0  # seconds, where a registry does not say how long

_FULL = ("no space left on device", "disk quota exceeded")
_RATE = re.compile(r"toomanyrequests|too many requests|(?<![0-9a-z])429(?![0-9a-z])")
_DENIED = (
    "unauthorized",
    "access denied",
    "requested access to the resource is denied",
    "no basic auth",
    "authentication required",
    "denied:",
    "403 forbidden",
)
_MISSING = ("manifest unknown", "not found", "name unknown", "no such image", "does not exist", "no matching")
_PASSING = (
    "connection refused",
    "connection reset",
    "i/o timeout",
    "timeout exceeded",
    "tls handshake timeout",
    "unexpected eof",
    "eof",
    "no such host",
    "temporary failure",
    "context canceled",
    "does not exist locally",
    "received unexpected http status: 5",
    "server error",
    "unavailable",
)
_AFTER = re.compile(r"retry.after[:=\s]*(\d+(?:\.\d+)?)", re.IGNORECASE)


def full(text: str) -> bool:
    return any(word in text.lower() for word in _FULL)


def of_transfer(doing: str, text: str) -> AttemptError:
    """Why a pull or a push failed. `doing` names the image and what was asked of whom."""
    low = text.lower()
    message = f"{doing}: {text.strip()[-1500:]}"
    if full(text):
        return _no_room(message)
    if _RATE.search(low):
        found = _AFTER.search(text)
        return ImageFailed(message, kind="rate", after=float(found[1]) if found else RATE_PAUSE)
    if any(word in low for word in _DENIED):
        return ImageFailed(message, "check the registry's credentials", kind="denied", again=False)
    if any(word in low for word in _PASSING):
        return ImageFailed(message, kind="registry")
    if any(word in low for word in _MISSING):
        return ImageFailed(message, kind="missing", again=False)
    return ImageFailed(message, kind="registry")


def of_build(doing: str, text: str, *, timed_out: bool = False) -> AttemptError:
    """Why a build failed: unless the daemon or its disk is to blame, the same steps fail again."""
    message = f"{doing}: {text.strip()[-2000:]}"
    if full(text):
        return _no_room(message)
    if timed_out:
        return ImageFailed(message, kind="timeout", again=False)
    if "cannot connect to the docker daemon" in text.lower():
        return of_daemon(message)
    return ImageFailed(message, "see the whole output in the image's log", kind="build", again=False)


def of_daemon(message: str, hint: str = "") -> AttemptError:
    """The daemon did not answer, or refused what it should not refuse."""
    return _no_room(message) if full(message) else ImageFailed(message, hint, kind="daemon")


def _no_room(message: str) -> AttemptError:
    return ResourceExhausted(message, "there is no room left on the docker daemon's disk", kind=DISK)
