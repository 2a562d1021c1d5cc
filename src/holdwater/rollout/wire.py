"""What conductor and worker say to each other: small records in length-prefixed msgpack over a socket pair.

A history never crosses here: exchanges and artifacts go straight to disk in the worker.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from ..core.config import RunConfig
from ..core.containers import Containers
from ..core.records import Ask, Attempt, Failure, Phase, Record, Usage, Verdict
from ..core.serving import Answer, ModelChoice, Steer
from ..ledger.text import encode

LARGEST_FRAME = 256 * 1024 * 1024
_LENGTH = struct.Struct("!I")


class Message(Record, frozen=True, tag=True):
    """One thing said."""


class Provider(Record, frozen=True):
    """A server of models. The key is in no file and in no sandbox."""

    url: str
    key: str | None = None
    bearer: bool = False  # its key goes into `Authorization`, whatever the dialect's own header is


class Upstream(Record, frozen=True):
    """Where model calls go: one server for every dialect, or one for each that is spoken."""

    everywhere: Provider | None = None
    spoken: dict[str, Provider] = msgspec.field(default_factory=dict)


class Offer(Record, frozen=True):
    """What an order brings for its attempts, beside the instance."""

    model: ModelChoice = ModelChoice()
    key: str | None = None  # of its endpoint: in no file
    sampling: dict[str, Any] = msgspec.field(default_factory=dict)  # beside what the run imposes
    limits: Ask = Ask()
    followed: bool = False  # turns are reported as they come (`Progress`)


class Welcome(Message, frozen=True):
    """The conductor's first message: everything that a worker has to know."""

    config: RunConfig
    directory: str
    worker: int
    token: int
    upstream: Upstream | None = None
    path: str = ""
    variables: dict[str, str] = msgspec.field(default_factory=dict)  # what instances may ask for
    containers: Containers | None = None  # where sandboxes are containers
    # Variables that are for the worker's own allocator -> what they were before: what it starts gets that.
    lent: dict[str, str | None] = msgspec.field(default_factory=dict)


class Job(Message, frozen=True):
    """Live this attempt."""

    attempt: Attempt
    payload: bytes  # the instance, as msgpack
    work: Verdict | None = None  # of the attempt whose kept work is graded; the agent does not act
    lease: int = 0  # bytes of memory that its sandbox may use; 0: as its limits say
    quota: int = 0  # bytes of disk that its sandbox may use where its limits say nothing; 0: what is free
    earlier: tuple[int, ...] = ()  # attempts that tried the same: what they were answered is not paid twice
    images: dict[str, str] = msgspec.field(default_factory=dict)  # `Start.key` -> what the daemon has for it
    offer: Offer | None = None  # None: as the run says


class Cancel(Message, frozen=True):
    """End the attempt with this failure. One that is scored ends its acting alone: it is graded."""

    attempt: int
    failure: Failure


class Score(Message, frozen=True):
    """Nobody is left to wait for: score the group's members that are here, or settle each by itself."""

    group: int
    together: bool


class Steered(Message, frozen=True):
    """The run's model is another one from now on."""

    to: Steer
    key: str | None = None  # in no file


class Take(Message, frozen=True):
    """Say what is asked in a held call."""

    attempt: int
    call: int
    whole: bool = False  # all of it: whoever answers has nothing of what came before


class Answered(Message, frozen=True):
    """Somebody answers a held call."""

    attempt: int
    call: int
    answer: Answer


class Allow(Message, frozen=True):
    """The attempt's lease is larger from now on."""

    attempt: int
    memory: int


class Trim(Message, frozen=True):
    """Give memory back that is not used, as soon as nothing is being done."""


class Leave(Message, frozen=True):
    """Exit; nothing is running any more."""


class Ready(Message, frozen=True):
    """The worker has loaded its suite and its agent."""

    allocator: str = ""  # the one that it really has


class Unfit(Message, frozen=True):
    """The worker cannot be started, and another one could not either."""

    message: str
    hint: str = ""
    exit_status: int = 4


class Living(Record, frozen=True):
    """One attempt in a beat."""

    attempt: int
    phase: Phase
    seconds: float
    usage: Usage = Usage()
    memory: int = 0  # bytes that its sandbox uses
    throttled: bool = False  # a call of it waits for a rate limit
    disk: int = 0  # bytes that its sandbox's directory takes
    cpu: float = 0.0  # seconds that its sandbox has used so far


class Beat(Message, frozen=True):
    """I am alive, and this is what I host."""

    rss: int
    lag: float  # the longest since the last beat
    living: tuple[Living, ...] = ()


class Done(Message, frozen=True):
    """The attempt's verdict, which is in the worker's journal already, unless the disk is full."""

    verdict: Verdict
    tainted: bool = False  # something of the attempt still runs in this process


class Arrived(Message, frozen=True):
    """The attempt has been graded and waits for its group."""

    attempt: int


class Progress(Message, frozen=True):
    """So many turns of a followed attempt are in the record."""

    attempt: int
    turns: int
    usage: Usage = Usage()


class Held(Message, frozen=True):
    """A call of the attempt waits for whoever answers in the place of a model."""

    attempt: int
    call: int  # 1, 2, 3, ... within the attempt


class Unheld(Message, frozen=True):
    """Nobody waits for the answer any more: its client went away, or its attempt is over."""

    attempt: int
    call: int


class Asked(Message, frozen=True):
    """What is asked in a held call: `core.serving.Called`, its parent by number."""

    attempt: int
    call: int
    dialect: str = ""  # empty: the call is not held any more
    append: tuple[bytes, ...] = ()
    parent: int | None = None
    keep: int = 0
    head: bytes | None = None
    streamed: bool = False


class Noted(Message, frozen=True):
    """A counted event: a failed clean-up, a failed duty."""

    kind: str
    message: str
    attempt: int | None = None


class Said(Message, frozen=True):
    """A log record that belongs to no attempt."""

    line: str


class Broken(Message, frozen=True):
    """The worker could not write; the run has to stop."""

    message: str


ToWorker = Welcome | Job | Cancel | Allow | Trim | Leave | Score | Steered | Take | Answered
ToConductor = Ready | Unfit | Beat | Done | Noted | Said | Broken | Arrived | Progress | Held | Unheld | Asked


def frame(message: Message) -> bytes:
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


T = TypeVar("T")


class Inbox(Generic[T]):
    """Decodes the frames of one direction."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    async def messages(self, reader: asyncio.StreamReader) -> AsyncIterator[T]:
        """Every whole message until the other side is gone."""
        while True:
            try:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > LARGEST_FRAME:
                    return  # not one of ours: whoever says that has lost its mind
                yield self._decoder.decode(await reader.readexactly(length))
            except (asyncio.IncompleteReadError, ConnectionError):
                return
