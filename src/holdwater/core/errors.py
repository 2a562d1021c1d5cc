"""One error tree. Each error says where it happened and whether trying again can help.

An error that ends an attempt becomes a `Failure` by `as_failure`; an error that ends a command is a
`HoldwaterError` whose `exit_status` the CLI returns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .records import Failure, Phase, Where
from .text import clean_text

LONGEST_KIND = 200  # characters


class HoldwaterError(Exception):
    """Anything that holdwater itself raises. The message is a sentence that a user can act on."""

    exit_status = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class BadInput(HoldwaterError):
    """What the user gave is wrong; the message names the place."""

    exit_status = 2


class RunLocked(BadInput):
    """Another conductor holds the run directory."""


class DuplicateInstance(BadInput):
    """A suite yields the same id twice; `rows` are the new instances that came before the second one."""

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


class SuiteFailed(BadInput):
    """The suite raised, hung or yielded something that is no instance."""


class Interrupted(HoldwaterError):
    """The run was asked to stop; it can be resumed."""

    exit_status = 3


class RunStopped(HoldwaterError):
    """A budget or a breaker stopped the run; it can be resumed."""

    exit_status = 4


class LedgerFailed(RunStopped):
    """The ledger could not be written. Nothing that was acknowledged is lost."""


class DiskFull(LedgerFailed):
    """There was no room to write it: with room, the same write would succeed."""


class LedgerCorrupt(RunStopped):
    """The ledger or a segment is not what was written."""


class Refused(HoldwaterError):
    """Something that a client of a server asked for and does not get; `code` is its `Problem`'s."""

    def __init__(self, code: str, message: str, hint: str = "", after: float = 0.0) -> None:
        super().__init__(message, hint)
        self.code = code  # see `docs/serving.md`
        self.after = after  # seconds


class AttemptError(HoldwaterError):
    """Something that ends an attempt. Subclasses say where."""

    where = Where.AGENT
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
    """The agent raised, exited with a status or gave up. It is graded on what it left."""


class LimitReached(AttemptError):
    where = Where.LIMIT
    kind = "timeout"


class ResourceExhausted(AttemptError):
    """The sandbox was stopped at its memory or disk limit."""

    where = Where.RESOURCE
    kind = "memory"


class ModelFailed(AttemptError):
    where = Where.MODEL
    kind = "upstream"


class SandboxFailed(AttemptError):
    where = Where.SANDBOX
    kind = "sandbox"


class ImageFailed(AttemptError):
    """An image could not be made, or be had. The message names the image, and what was asked of whom."""

    where = Where.IMAGE
    kind = "image"


class GradeFailed(AttemptError):
    where = Where.GRADE
    kind = "grade"


AGENT_MISSING = "agent-missing"  # the kind of failure of an agent whose program is not there


class RunFailed(AttemptError):
    """A failure that will hit every instance: a bad key, a missing model, a missing binary, a full disk."""

    exit_status = 4
    where = Where.RUN
    kind = "run"
    again = False


class AttemptOver(HoldwaterError):
    """A call on a sandbox or a model whose attempt has ended; only late threads ever see it."""


def as_failure(error: BaseException, otherwise: type[AttemptError], phase: Phase) -> Failure:
    """The failure that `error` stands for; a foreign exception counts as an `otherwise`."""
    if isinstance(error, AttemptError):
        return Failure(
            where=error.where,
            kind=clean_text(str(error.kind)[:LONGEST_KIND]),
            message=clean_text(str(error.message)),
            hint=clean_text(str(error.hint)),
            phase=phase,
            again=bool(error.again),
            after=_as_seconds(error.after),
        )
    if isinstance(error, MemoryError):
        message = "there was no more memory for it in its worker"
        return Failure(where=Where.RESOURCE, kind="memory", message=message, phase=phase)
    return Failure(where=otherwise.where, kind="exception", message=_told(error), phase=phase)


def first(group: BaseExceptionGroup[HoldwaterError]) -> HoldwaterError:
    """The first of the errors that came together."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HoldwaterError)
    return error


def let_go(error: BaseException) -> None:
    """Part an error that has been dealt with, and what it came from, from the frames that they went through.

    A frame that knows the task which failed, or keeps the error, is held by it in turn: a cycle, in which
    everything that the frames know would stay until a full collection.
    """
    pending: list[BaseException] = [error]
    seen: set[int] = set()  # bound: the errors that this one came from, and which may go round
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
    """Errors come from users too: a delay that is no number is none."""
    return float(after) if isinstance(after, int | float) and math.isfinite(after) else 0.0


def _told(error: BaseException) -> str:
    try:
        return clean_text(f"{type(error).__name__}: {error}"[:2000])
    except Exception:  # boundary: an exception's own `__str__`  # noqa: BLE001
        return type(error).__name__
