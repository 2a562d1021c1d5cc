"""Classify errors of a daemon or a build: full disk, rate limit, refusal, missing base, broken Dockerfile.

Pure. The daemon passes on a registry's response as text only, so known phrases decide the class.
"""

from __future__ import annotations

import re

from ...core.errors import AttemptError, ImageFailed, ResourceExhausted
from ...core.failures import DISK

RATE_PAUSE = 30.0  # seconds, if the registry sends no Retry-After

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
_TRANSIENT = (
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
# A daemon that was killed may have lost a layer that its build cache still names.
_DAMAGED = re.compile(r"failed to (?:prepare|get usage)\b.*no such file or directory", re.DOTALL)
_RETRY_AFTER = re.compile(r"retry.after[:=\s]*(\d+(?:\.\d+)?)", re.IGNORECASE)


def is_disk_full(text: str) -> bool:
    return any(word in text.lower() for word in _FULL)


def is_cache_damaged(text: str) -> bool:
    """Return whether the daemon's build cache names data that the daemon does not have."""
    return _DAMAGED.search(text) is not None


def transfer_error(doing: str, text: str) -> AttemptError:
    """Return the error of a failed pull or push. `doing` names the image and the operation."""
    low = text.lower()
    message = f"{doing}: {text.strip()[-1500:]}"
    if is_disk_full(text):
        return _disk_error(message)
    if _RATE.search(low):
        found = _RETRY_AFTER.search(text)
        return ImageFailed(message, kind="rate", after=float(found[1]) if found else RATE_PAUSE)
    if any(word in low for word in _DENIED):
        return ImageFailed(message, "check the registry's credentials", kind="denied", again=False)
    if any(word in low for word in _TRANSIENT):
        return ImageFailed(message, kind="registry")
    if any(word in low for word in _MISSING):
        return ImageFailed(message, kind="missing", again=False)
    return ImageFailed(message, kind="registry")


def build_error(doing: str, text: str, *, timed_out: bool = False) -> AttemptError:
    """Return the error of a failed build; no retry unless the daemon or its disk caused the failure."""
    message = f"{doing}: {text.strip()[-2000:]}"
    if is_disk_full(text):
        return _disk_error(message)
    if timed_out:
        return ImageFailed(message, kind="timeout", again=False)
    if "cannot connect to the docker daemon" in text.lower():
        return daemon_error(message)
    if is_cache_damaged(text):
        return daemon_error(message, "the build cache of the daemon is damaged: `docker builder prune --all`")
    return ImageFailed(message, "see the whole output in the image's log", kind="build", again=False)


def daemon_error(message: str, hint: str = "") -> AttemptError:
    """Return the error for a daemon that did not respond, or refused a valid request."""
    return _disk_error(message) if is_disk_full(message) else ImageFailed(message, hint, kind="daemon")


def _disk_error(message: str) -> AttemptError:
    return ResourceExhausted(message, "there is no room left on the docker daemon's disk", kind=DISK)
