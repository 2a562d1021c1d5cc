"""The messages between conductor and worker: small records in length-prefixed msgpack over a socket pair.

Conversations never pass through here: the worker writes exchanges and artifacts straight to disk.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from ..core.config import RunConfig
from ..core.endpoints import EndpointUse
from ..core.records import Attempt, AttemptFailure, AttemptPhase, LimitOverrides, ModelUsage, Record, Verdict
from ..core.serving_protocol import CallAnswer, ModelChoice, SteerRequest
from ..ledger.record_encoding import encode_unmasked

LARGEST_FRAME = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class WorkerMessage(Record, frozen=True, tag=True):
    """A message between conductor and worker."""


class ModelProvider(Record, frozen=True):
    """A server of models. Its key is never written to a file or passed to a sandbox."""

    url: str
    key: str | None = None
    bearer: bool = False  # send the key in `Authorization`, not in the dialect's own header
    weight: float = 1.0  # its share of the calls, if there are several
    models: tuple[str, ...] = ()  # patterns of the only models that it serves


class UpstreamConfig(Record, frozen=True):
    """The servers for model calls: some for all dialects, or one for each dialect in use; none: no model."""

    everywhere: tuple[ModelProvider, ...] = ()
    spoken: dict[str, ModelProvider] = msgspec.field(default_factory=dict)
    judge: ModelProvider | None = None  # for the calls of judges; None: they go where the agent's calls go


class OrderTerms(Record, frozen=True):
    """The terms of an order for its attempts, beside the instance."""

    model: ModelChoice = ModelChoice()
    key: str | None = None  # of its endpoint; never written to a file
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)  # in addition to the run's own
    limits: LimitOverrides = LimitOverrides()
    followed: bool = False  # turns are reported as they happen (`AttemptProgress`)


class WorkerSetup(WorkerMessage, frozen=True):
    """The conductor's first message: everything that a worker needs to start."""

    config: RunConfig
    directory: str
    worker: int
    token: int
    upstream: UpstreamConfig | None = None
    path: str = ""
    variables: dict[str, str] = msgspec.field(default_factory=dict)  # variables that instances may use
    agent_env: dict[str, str] = msgspec.field(default_factory=dict)  # variables of the agent's commands
    provided: Any = None  # from the provision of the sandboxes' kind
    # Variables for the worker's own allocator -> their values before, which processes that it starts get.
    lent: dict[str, str | None] = msgspec.field(default_factory=dict)

    @property
    def answers_calls(self) -> bool:
        """Whether attempts can call a model, beside a policy that is passed as a function."""
        config = self.config
        return self.upstream is not None or config.replays is not None or config.serving is not None


class AttemptJob(WorkerMessage, frozen=True):
    """Run this attempt."""

    attempt: Attempt
    payload: bytes  # the instance, as msgpack
    work: Verdict | None = None  # of the attempt whose kept work is graded again; the agent does not act
    lease: int = 0  # bytes of memory for its sandbox; 0: as its limits say
    quota: int = 0  # bytes of disk for its sandbox if its limits set none; 0: all free space
    earlier: tuple[int, ...] = ()  # attempts at the same sample, whose recorded replies are not paid twice
    images: dict[str, str] = msgspec.field(default_factory=dict)  # `SandboxSpec.key` -> image on the daemon
    offer: OrderTerms | None = None  # None: as the run says


class CancelAttempt(WorkerMessage, frozen=True):
    """End the attempt with this failure. A scored failure ends only the acting: grading follows."""

    attempt: int
    failure: AttemptFailure


class ScoreMembers(WorkerMessage, frozen=True):
    """Score the waiting members of a group together, or settle each by itself: no other member will come."""

    group: int
    together: bool


class SteerWorker(WorkerMessage, frozen=True):
    """Replace the run's model from now on."""

    to: SteerRequest
    key: str | None = None  # never written to a file


class PauseWorker(WorkerMessage, frozen=True):
    """Hold new model calls and stop the clocks of attempts while the run is paused."""

    paused: bool


class ChangeWorker(WorkerMessage, frozen=True):
    """Apply the limits and rates of this configuration: limits to attempts that start from now on."""

    config: RunConfig


class FetchHeldCall(WorkerMessage, frozen=True):
    """Request the content of a held call; `HeldCallContent` is the reply."""

    attempt: int
    call: int
    whole: bool = False  # the whole request: the trainer has none of the earlier messages


class AnswerHeldCall(WorkerMessage, frozen=True):
    """Pass the trainer's answer to a held call."""

    attempt: int
    call: int
    answer: CallAnswer


class ExtendLease(WorkerMessage, frozen=True):
    """Enlarge the attempt's lease to `memory` bytes."""

    attempt: int
    memory: int


class TrimMemory(WorkerMessage, frozen=True):
    """Give unused memory back as soon as the worker is quiet."""


class ExitWorker(WorkerMessage, frozen=True):
    """Exit: no attempt is running any more."""


class WorkerReady(WorkerMessage, frozen=True):
    """The worker has loaded its suite and its agent."""

    allocator: str = ""  # the allocator that the worker really uses


class WorkerUnfit(WorkerMessage, frozen=True):
    """The worker cannot start, and a replacement could not either."""

    message: str
    hint: str = ""
    exit_status: int = 4


class AttemptStatus(Record, frozen=True):
    """The status of one attempt in a heartbeat."""

    attempt: int
    phase: AttemptPhase
    seconds: float
    usage: ModelUsage = ModelUsage()
    memory: int = 0  # bytes that its sandbox uses
    throttled: bool = False  # one of its model calls waits for a rate limit
    disk: int = 0  # bytes in its sandbox's directory
    cpu: float = 0.0  # seconds that its sandbox has used so far


class WorkerHeartbeat(WorkerMessage, frozen=True):
    """The worker is alive and hosts these attempts."""

    rss: int
    lag: float  # seconds: the longest since the last heartbeat
    living: tuple[AttemptStatus, ...] = ()


class EndpointsUsed(WorkerMessage, frozen=True):
    """The calls of each of the model's servers since the last report."""

    uses: tuple[EndpointUse, ...]


class AttemptDone(WorkerMessage, frozen=True):
    """The attempt's verdict, which is in the worker's journal already, unless the disk is full."""

    verdict: Verdict
    tainted: bool = False  # code of the attempt still runs in this process


class MemberWaiting(WorkerMessage, frozen=True):
    """The attempt has been graded and waits for its group."""

    attempt: int


class AttemptProgress(WorkerMessage, frozen=True):
    """The number of turns of a followed attempt that are recorded so far."""

    attempt: int
    turns: int
    usage: ModelUsage = ModelUsage()


class CallHeld(WorkerMessage, frozen=True):
    """A model call of the attempt is held: it waits for the trainer's answer."""

    attempt: int
    call: int  # 1, 2, 3, ... within the attempt


class CallReleased(WorkerMessage, frozen=True):
    """A held call needs no answer any more: its client disconnected, or its attempt is over."""

    attempt: int
    call: int


class HeldCallContent(WorkerMessage, frozen=True):
    """The content of a held call: like `core.serving_protocol.Called`, but with the number of its parent."""

    attempt: int
    call: int
    dialect: str = ""  # empty: the call is not held any more
    append: tuple[bytes, ...] = ()
    parent: int | None = None
    keep: int = 0
    head: bytes | None = None
    streamed: bool = False


class EventNoted(WorkerMessage, frozen=True):
    """An event that is counted, such as a failed clean-up or a failed periodic task."""

    kind: str
    message: str
    attempt: int | None = None


class LineLogged(WorkerMessage, frozen=True):
    """A log record that belongs to no attempt."""

    line: str


class WorkerBroken(WorkerMessage, frozen=True):
    """The worker could not write; the run has to stop."""

    message: str


ToWorker = (
    WorkerSetup
    | AttemptJob
    | CancelAttempt
    | ExtendLease
    | TrimMemory
    | ExitWorker
    | ScoreMembers
    | SteerWorker
    | PauseWorker
    | ChangeWorker
    | FetchHeldCall
    | AnswerHeldCall
)
StandingMessage = SteerWorker | PauseWorker | ChangeWorker
"""A message to all workers, also to workers that start later: the last one of each kind holds."""
ToConductor = (
    WorkerReady
    | WorkerUnfit
    | WorkerHeartbeat
    | EndpointsUsed
    | AttemptDone
    | EventNoted
    | LineLogged
    | WorkerBroken
    | MemberWaiting
    | AttemptProgress
    | CallHeld
    | CallReleased
    | HeldCallContent
)


def encode_frame(message: WorkerMessage) -> bytes:
    body = encode_unmasked(message)
    return _LENGTH.pack(len(body)) + body


T = TypeVar("T")


class MessageReader(Generic[T]):
    """Decodes the frames of one direction."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    async def messages(self, reader: asyncio.StreamReader) -> AsyncIterator[T]:
        """Yield every complete message until the other side closes the connection."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > LARGEST_FRAME:
                    return  # not a frame of ours: the sender is broken
                yield self._decoder.decode(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
