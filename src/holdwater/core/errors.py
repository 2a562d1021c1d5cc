"""The error hierarchy. Each error states its origin and whether a retry can help.

`as_failure` converts an error that ends an attempt to an `AttemptFailure`. An error that ends a command is
a `HoldwaterError`, whose `exit_status` the CLI returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .masking import clean_text
from .records import AttemptFailure, AttemptPhase, FailureOrigin

LONGEST_KIND = 200  # characters


class HoldwaterError(Exception):
    """The base class of all errors that holdwater raises.

    The message is a sentence that a user can act on.
    """

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(HoldwaterError):
    """The user's input is invalid; the message names the location."""

    exit_status = 2


class RunLocked(BadInput):
    """Another conductor holds the run directory."""


class DuplicateInstance(BadInput):
    """A suite yields the same id twice; `rows` are the new instances before the duplicate."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class SuiteFailed(BadInput):
    """The suite raised, hung or yielded an object that is not an instance."""


class RunInterrupted(HoldwaterError):
    """The run was interrupted by a request to stop; it can be resumed."""

    exit_status = 3


class RunStopped(HoldwaterError):
    """A budget or a breaker stopped the run; it can be resumed."""

    exit_status = 4


class LedgerFailed(RunStopped):
    """The ledger could not be written. No acknowledged record is lost."""


class DiskFull(LedgerFailed):
    """The disk was full: the same write succeeds once there is room."""


class LedgerCorrupt(RunStopped):
    """The content of the ledger or of a segment differs from what was written."""


class RequestRefused(HoldwaterError):
    """A server refused a client's request; `code` is the code of its `ProblemDetails`."""

    def __init__(self, code: str, message: str, hint: str = "", after: float = 0.0) -> None:
        super().__init__(message, hint)
        self.code = code  # see `docs/serving.md`
        self.after = after  # seconds


class AttemptError(HoldwaterError):
    """An error that ends an attempt. Subclasses define its origin."""

    where = FailureOrigin.AGENT
    kind = "error"
    again = True

    def __init__(
        self, message: str, hint: str = "", *, kind: str = "", again: bool | None = None, after: float = 0.0
    ) -> None:
        super().__init__(message, hint)
        self.kind = kind or self.kind
        self.again = self.again if again is None else again
        self.after = after


class AgentFailed(AttemptError):
    """The agent raised, exited with a non-zero status or gave up. Its work so far is graded."""


class LimitReached(AttemptError):
    where = FailureOrigin.LIMIT
    kind = "timeout"


class ResourceExhausted(AttemptError):
    """The sandbox was stopped at its memory or disk limit."""

    where = FailureOrigin.RESOURCE
    kind = "memory"


class ModelFailed(AttemptError):
    where = FailureOrigin.MODEL
    kind = "upstream"


class SandboxFailed(AttemptError):
    where = FailureOrigin.SANDBOX
    kind = "sandbox"


class AttemptInterrupted(AttemptError):
    """The machine of the attempt's sandbox is gone, or took the sandbox back: the attempt is not at fault."""

    where = FailureOrigin.INTERRUPTED
    kind = "interrupted"


class ImageFailed(AttemptError):
    """An image could not be built or pulled.

    The message names the image, the failed request and the registry or daemon.
    """

    where = FailureOrigin.IMAGE
    kind = "image"


class GradeFailed(AttemptError):
    where = FailureOrigin.GRADE
    kind = "grade"


AGENT_MISSING = "agent-missing"  # failure kind: the agent's program does not exist


class RunFailed(AttemptError):
    """A failure that affects every instance: a bad key, a missing model, a missing binary, a full disk."""

    exit_status = 4
    where = FailureOrigin.RUN
    kind = "run"
    again = False


class AttemptOver(HoldwaterError):
    """A call on the sandbox or model of an ended attempt; only late threads can cause it."""


def as_failure(error: BaseException, otherwise: type[AttemptError], phase: AttemptPhase) -> AttemptFailure:
    """Convert `error` to a failure; an exception of user code counts as an `otherwise`."""
    if isinstance(error, AttemptError):
        return AttemptFailure(
            where=error.where,
            kind=clean_text(str(error.kind)[:LONGEST_KIND]),
            message=clean_text(str(error.message)),
            hint=clean_text(str(error.hint)),
            phase=phase,
            again=bool(error.again),
            after=_as_seconds(error.after),
        )
    if isinstance(error, MemoryError):
        message = "out of memory in the worker"
        return AttemptFailure(where=FailureOrigin.RESOURCE, kind="memory", message=message, phase=phase)
    return AttemptFailure(
        where=otherwise.where, kind="exception", message=_describe_error(error), phase=phase
    )


def find_first_error(group: BaseExceptionGroup[HoldwaterError]) -> HoldwaterError:
    """Return the first error of a group, which may be nested."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HoldwaterError)
    return error


def drop_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of a handled error and of all errors that it came from.

    A traceback holds its frames. A frame that refers to the failed task, or to the error, forms a cycle
    with it, and all objects of these frames would stay in memory until a full collection.
    """
    pending: list[BaseException] = [error]
    seen: set[int] = set()  # bound: the errors that this one came from, which may form a cycle
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        pending += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            pending += one.exceptions


def _as_seconds(after: object) -> float:
    """Return the delay, or 0 if it is not a finite number: user code raises these errors too."""
    return float(after) if isinstance(after, int | float) and math.isfinite(after) else 0.0


def _describe_error(error: BaseException) -> str:
    try:
        return clean_text(f"{type(error).__name__}: {error}"[:2000])
    except Exception:  # boundary: an exception's own `__str__`  # noqa: BLE001
        return type(error).__name__
