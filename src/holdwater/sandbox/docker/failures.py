"""Maps the daemon's errors to failures of an attempt: an infrastructure failure is never the agent's.

The patterns are docker's own messages, which are stable across releases; unknown messages are passed on
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import AttemptError, ImageFailed, SandboxFailed
from ...docker.client import DaemonGone, DockerError

DAEMON_HINT = "the attempt is retried; check that the daemon runs and that nothing removes its containers"
GONE_MESSAGES = (
    "No such container",
    "is not running",
    "No such exec",
    "is dead",
    "is restarting",
    "marked for removal",
    "RWLayer of container",  # removal is in progress
)
NOT_FOUND = ("executable file not found", "no such file or directory")
STOPPED = ("cannot exec in a stopped", "cannot exec a container that has stopped")  # runc's messages


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn a daemon error into a failure of the attempt; `doing` describes the failed operation."""
    try:
        yield
    except DockerError as error:
        raise make_failure(error, doing) from error


def make_failure(error: DockerError, doing: str) -> AttemptError:
    told = error.message.strip()
    if isinstance(error, DaemonGone):
        return SandboxFailed(f"{doing}: {told}", DAEMON_HINT, kind="daemon")
    if "No such image" in told:
        return ImageFailed(f"{doing}: {told}", "check whether it was removed meanwhile", kind="missing")
    if is_gone(error):
        return make_gone_error(doing)
    return SandboxFailed(f"{doing}: {told}", kind="daemon" if error.status >= 500 else "")


def is_gone(error: DockerError) -> bool:
    """Whether the container no longer exists or does not run."""
    return error.status in (404, 409, 500) and any(words in error.message for words in GONE_MESSAGES)


def make_gone_error(doing: str) -> SandboxFailed:
    return SandboxFailed(
        f"{doing}: the container is gone: something else stopped or removed it", DAEMON_HINT, kind="daemon"
    )


def make_start_error(told: str, program: str) -> SandboxFailed:
    """Return the error for a command whose program never ran."""
    if any(words in told for words in STOPPED):  # it stopped between the daemon's check and the start
        return make_gone_error("cannot start the command")
    if any(words in told for words in NOT_FOUND) and "chdir" not in told:
        return SandboxFailed(f"no such program in the sandbox: `{program}`", kind="missing", again=False)
    refused = "chdir" in told or "find user" in told or "permission denied" in told
    return SandboxFailed(
        f"cannot start the command: {told.strip()[-500:]}", kind="spawn", again=False if refused else None
    )
