"""What the daemon refuses, as failures of an attempt: an infrastructure failure is never the agent's.

The words are docker's own and have been the same over its releases; what is not known here is told as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import AttemptError, ImageFailed, SandboxFailed
from ...docker.client import DaemonGone, DockerError

BACK = "it is tried again; is the daemon running, and does it keep its containers?"
GONE = (
    "No such container",
    "is not running",
    "No such exec",
    "is dead",
    "is restarting",
    "marked for removal",
    "RWLayer of container",  # it is being removed just now
)
NOT_FOUND = ("executable file not found", "no such file or directory")


@contextmanager
def reported(doing: str) -> Iterator[None]:
    """Turn what the daemon says into a failure of the attempt; `doing` is what was tried."""
    try:
        yield
    except DockerError as error:
        raise failure(error, doing) from error


def failure(error: DockerError, doing: str) -> AttemptError:
    told = error.message.strip()
    if isinstance(error, DaemonGone):
        return SandboxFailed(f"{doing}: {told}", BACK, kind="daemon")
    if "No such image" in told:
        return ImageFailed(f"{doing}: {told}", "was it removed meanwhile?", kind="missing")
    if gone(error):
        return container_gone(doing)
    return SandboxFailed(f"{doing}: {told}", kind="daemon" if error.status >= 500 else "")


def gone(error: DockerError) -> bool:
    """Whether the container is not there any more, or does not run."""
    return error.status in (404, 409, 500) and any(words in error.message for words in GONE)


def container_gone(doing: str) -> SandboxFailed:
    return SandboxFailed(f"{doing}: the container is gone: something else ended it", BACK, kind="daemon")


def not_started(told: str, program: str) -> SandboxFailed:
    """A command whose program never ran."""
    if any(words in told for words in NOT_FOUND) and "chdir" not in told:
        return SandboxFailed(f"no such program in the sandbox: `{program}`", kind="missing", again=False)
    refused = "chdir" in told or "find user" in told or "permission denied" in told
    return SandboxFailed(
        f"cannot start the command: {told.strip()[-500:]}", kind="spawn", again=False if refused else None
    )
