"""The events of a fleet and the commands that follow from them. `workers.py` connects the two."""

from __future__ import annotations

from enum import StrEnum

from .records import Attempt, AttemptFailure, Record


class FleetEvent(Record, frozen=True, tag=True):
    """An event, at a time of the fleet's clock."""


class SuccessorStart(StrEnum):
    """When the successor of a worker starts."""

    FIRST = "first"  # the worker goes on until its successor is ready
    NOW = "now"  # the worker drains from now on, beside its successor
    AFTER = "after"  # when the worker is gone: there is no memory for both


class FleetOpened(FleetEvent, frozen=True):
    """The fleet can start workers."""


class FleetClosed(FleetEvent, frozen=True):
    """The run is over: all workers end."""


class AttemptOffered(FleetEvent, frozen=True):
    """An attempt needs a worker."""

    attempt: Attempt
    lease: int = 0  # bytes, which it cannot use before it has a worker


class AttemptWithdrawn(FleetEvent, frozen=True):
    """An attempt needs no worker any more; it has no verdict either."""

    attempt: int


class AttemptStopped(FleetEvent, frozen=True):
    """An attempt must end with this failure."""

    attempt: int
    failure: AttemptFailure


class AttemptGivenUp(FleetEvent, frozen=True):
    """An attempt hangs: it has its verdict, and its worker takes no more."""

    attempt: int


class AttemptReported(FleetEvent, frozen=True):
    """A worker has reported the verdict of an attempt."""

    worker: int
    attempt: int
    tainted: bool = False  # code of the attempt still runs in the worker


class WorkerOpened(FleetEvent, frozen=True):
    """A worker is ready for attempts."""

    worker: int


class WorkerRefused(FleetEvent, frozen=True):
    """A worker reports why it cannot start."""

    worker: int
    message: str
    hint: str = ""
    exit_status: int = 4


class StartFailed(FleetEvent, frozen=True):
    """The process of a worker could not be started."""

    worker: int
    reason: str


class WorkerDisconnected(FleetEvent, frozen=True):
    """A worker is about to die: no message reaches it any more, and its last one has arrived."""

    worker: int


class WorkerDied(FleetEvent, frozen=True):
    """The process of a worker is dead."""

    worker: int
    reason: str
    own: bool  # by its own fault: it crashed, exited or hung
    hint: str = ""


class WorkerRecovered(FleetEvent, frozen=True):
    """The journal of a dead worker has been read. These attempts had a verdict."""

    worker: int
    settled: tuple[int, ...] = ()


class WorkerMeasure(Record, frozen=True):
    """One worker at one moment."""

    worker: int
    rss: int = 0
    age: float = 0.0  # seconds since its start
    silence: float = 0.0  # seconds without a message
    idle: float = 0.0  # seconds without a message and without CPU use
    load: str = ""  # the attempts in it, for a message


class WorkersMeasured(FleetEvent, frozen=True):
    """The patrol of each second."""

    measures: tuple[WorkerMeasure, ...]


class ReplacementRequested(FleetEvent, frozen=True):
    """A worker is to be replaced."""

    worker: int
    reason: str
    successor: SuccessorStart


class DemandChanged(FleetEvent, frozen=True):
    """The load on a server, and its free memory."""

    running: int
    waiting: int
    room: int  # bytes
    start_cost: int  # bytes that a new worker takes until it is ready


class FleetCommand(Record, frozen=True, tag=True):
    """A command of `WorkerPlanner`, which the fleet carries out in order."""


class StartWorker(FleetCommand, frozen=True):
    """Start a worker; `WorkerOpened`, `WorkerRefused`, `StartFailed` or `WorkerDied` follows."""

    worker: int


class HostAttempt(FleetCommand, frozen=True):
    """Send the attempt to this worker."""

    worker: int
    attempt: int


class StopAttempt(FleetCommand, frozen=True):
    """Make the worker end the attempt with this failure."""

    worker: int
    attempt: int
    failure: AttemptFailure


class ReturnAttempt(FleetCommand, frozen=True):
    """Report this failure as the attempt's verdict: no worker does."""

    attempt: int
    failure: AttemptFailure


class DismissWorker(FleetCommand, frozen=True):
    """Ask the worker to exit, and kill it if it does not."""

    worker: int


class KillWorker(FleetCommand, frozen=True):
    """Kill the worker's process."""

    worker: int
    reason: str | None = None
    hung: bool = False


class RecoverWorker(FleetCommand, frozen=True):
    """Read the journal of a dead worker, clean up after these attempts; `WorkerRecovered` follows."""

    worker: int
    attempts: tuple[int, ...]


class NoteEvent(FleetCommand, frozen=True):
    """Record an event of the run."""

    kind: str
    message: str


class StopRun(FleetCommand, frozen=True):
    """End the run: no worker can start."""

    message: str
    hint: str = ""
    exit_status: int = 4


AnyWorkerEvent = (
    WorkerOpened
    | WorkerRefused
    | StartFailed
    | WorkerDisconnected
    | WorkerDied
    | WorkerRecovered
    | WorkersMeasured
    | ReplacementRequested
)
AnyFleetEvent = (
    FleetOpened
    | FleetClosed
    | DemandChanged
    | AttemptOffered
    | AttemptWithdrawn
    | AttemptStopped
    | AttemptGivenUp
    | AttemptReported
    | AnyWorkerEvent
)
AnyFleetCommand = (
    StartWorker
    | HostAttempt
    | StopAttempt
    | ReturnAttempt
    | DismissWorker
    | KillWorker
    | RecoverWorker
    | NoteEvent
    | StopRun
)
