"""What clients and the server say to each other: one versioned schema, as JSON or as msgpack.

An `Order` is what a client asks for, a `Result` what it gets; an `Event` is what is told on the way. The
server is in `serve/`, the client in `client/`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import field

from .groups import GroupTerms
from .records import NO_USAGE, Ask, Child, Failure, Instance, Record, Times, Usage

PROTOCOL = 1
LONGEST_KEY = 200  # characters of an idempotency key
KEPT_CALLS = 16  # of a rollout: a client keeps the newest so many that it was told of, as parents of the next


class Source(StrEnum):
    """Who answers the model calls of a rollout."""

    RUN = "run"  # what the server was started with, or was last told: see `Steer`
    ENDPOINT = "endpoint"  # a server of the client's choice, for this order
    FUNCTION = "function"  # the server's `--policy`: a Python function in the worker
    TRAINER = "trainer"  # the client itself: calls are handed to it (`Called`), it answers (`Answer`)


class ModelChoice(Record, frozen=True):
    """The model behind an order. An endpoint's key is no part of it: a header brings it, kept nowhere."""

    source: Source = Source.RUN
    url: str | None = None  # of an endpoint: its base URL (`.../v1`)
    name: str | None = None  # the model's; None: as the agent asks
    version: str = ""  # of an endpoint's weights: written to every exchange


class Trajectories(StrEnum):
    """How a result carries the conversation."""

    NODES = "nodes"
    REFERENCE = "reference"  # where it lies on the server's disk, for `holdwater.read`
    NONE = "none"


class Order(Record, frozen=True):
    """One rollout, or a group of `size`. The same key is the same order, however often it is sent."""

    key: str
    instance: str | Instance  # one of the suite's by its id, or a whole one
    protocol: int = PROTOCOL
    size: int = 1
    group: GroupTerms | None = None  # None: `size` rollouts that have nothing to do with each other
    model: ModelChoice = ModelChoice()
    sampling: dict[str, Any] = field(default_factory=dict)  # imposed on every request
    limits: Ask = Ask()
    trajectory: Trajectories = Trajectories.NODES
    detached: bool = False  # it goes on when its client is gone; the result waits
    turns: bool = False  # `Turned` is told as turns come

    def __post_init__(self) -> None:
        if not self.key or len(self.key) > LONGEST_KEY or not self.key.isprintable():
            raise ValueError(f"`key` must have 1 to {LONGEST_KEY} printable characters")
        if self.size < 1:
            raise ValueError(f"`size` must be at least 1: {self.size}")
        if (self.model.source is Source.ENDPOINT) != (self.model.url is not None):
            raise ValueError("`model.url` belongs to the source `endpoint`, which needs one")


class Steer(Record, frozen=True):
    """From now on the calls of orders with the source `run` go here, also those of running rollouts."""

    url: str
    name: str | None = None
    version: str = ""


class Node(Record, frozen=True):
    """A message of a conversation. Conversations that begin alike share their first nodes."""

    id: int  # 0, 1, 2, ... within the rollout
    parent: int | None  # the message before it
    role: str
    message: Any  # as it was sent, in its dialect; media are references to the run's blobs
    exchange: int  # in which it was first seen
    dialect: str = "chat"
    sampled: bool = False  # the model said it: what a trainer trains on (the mask)
    tokens: tuple[int, ...] | None = None  # ids, where the upstream gives them
    prompt_tokens: tuple[int, ...] | None = None  # of a sampled one: ids of all that was before it
    # One a token; None: the upstream gave none, or no finite number (JSON has neither NaN nor infinity).
    logprobs: tuple[float | None, ...] | None = None
    version: str = ""  # of the policy that said it
    finish: str = ""
    by: str = ""  # the child attempt that asked; empty: the attempt itself


class Reference(Record, frozen=True):
    """Where a conversation lies: `holdwater.read(directory)` reads it."""

    directory: str
    attempt: int


class Rollout(Record, frozen=True):
    """One rollout that is over."""

    instance: str
    sample: int
    member: int  # 0, 1, 2, ... within the order
    outcome: str  # `passed`, `failed`, or the place of its failure
    attempt: int  # that the outcome was chosen from; 0: none was begun
    reward: float | None = None  # its score; None: it could not be scored
    failure: Failure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    answer: Any = None
    usage: Usage = NO_USAGE
    saved: Usage = NO_USAGE  # what was answered from the record, and not paid for again
    times: Times = Times()
    exchanges: int = 0
    children: tuple[Child, ...] = ()
    trajectory: tuple[Node, ...] | None = None
    reference: Reference | None = None


class Result(Record, frozen=True):
    """What became of an order."""

    key: str
    order: int
    rollouts: tuple[Rollout, ...]  # as many as were ordered
    protocol: int = PROTOCOL
    together: bool = False  # a group that was scored together
    new: bool = True  # False: this result has been delivered before
    replaced: tuple[Rollout, ...] = ()  # of a group: members that failed for good, whose places others took


class Problem(Record, frozen=True):
    """Why something was refused: the body of every error."""

    code: str  # see `docs/serving.md`
    message: str
    hint: str = ""
    after: float = 0.0  # seconds to wait before it is worth trying again


class Event(Record, frozen=True, tag_field="event", tag=str.lower):
    """Something that is told on the way; `member` says of which rollout of the order."""


class Accepted(Event, frozen=True):
    """The order is in the ledger."""

    order: int
    protocol: int = PROTOCOL
    new: bool = True  # False: it was known already, and goes on


class Started(Event, frozen=True):
    member: int
    attempt: int


class Turned(Event, frozen=True):
    """Turns are in the record; `usage` is the attempt's so far, `nodes` what has not been told yet."""

    member: int
    attempt: int
    turns: int
    usage: Usage = NO_USAGE
    nodes: tuple[Node, ...] = ()


class Called(Event, frozen=True):
    """The agent asks its model, and the client is to answer: of the request, what is new.

    Its messages are the first `keep` of the call `parent` and then `append`; its other keys are `head`, or
    those of `parent` where that is None.
    """

    member: int
    call: str  # names it in the `Answer`
    dialect: str
    append: tuple[str, ...]  # each a message, as JSON
    parent: str | None = None
    keep: int = 0
    head: str | None = None  # as JSON
    streamed: bool = False  # whether the agent wants its answer as a stream: the gateway sees to that


class Dropped(Event, frozen=True):
    """Nobody waits for an answer to this call any more."""

    member: int
    call: str


class Settled(Event, frozen=True):
    """A member is closed; the result follows when all are."""

    member: int
    outcome: str
    reward: float | None = None


class Finished(Event, frozen=True):
    result: Result


AnyEvent = Accepted | Started | Turned | Called | Dropped | Settled | Finished


class Answer(Record, frozen=True):
    """The client's answer to a call: one of `text`, `reply` and `error`."""

    call: str
    text: str | None = None
    # A `chat.completion`, its message, or a whole reply in the dialect of the call.
    reply: dict[str, Any] | None = None
    error: str | None = None  # the call fails with this
    version: str = ""  # of the policy that answers

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.text, self.reply, self.error)) != 1:
            raise ValueError("an answer has one of `text`, `reply` and `error`")


class Health(Record, frozen=True):
    """Whether work is taken, and done."""

    ok: bool  # it takes orders, and a worker is ready for them
    state: str  # `starting`, `serving`, `degraded`, `draining`, `broken`
    reason: str = ""  # why it is not `serving`
    ready: int = 0  # workers
    wanted: int = 0
    running: int = 0
    waiting: int = 0
    protocol: int = PROTOCOL


class Stats(Record, frozen=True):
    """What a server does, measured by itself. Rates are those of the last minute."""

    at: float
    uptime: float
    health: Health
    orders: dict[str, int] = field(default_factory=dict)  # `open`, `accepted`, `refused`, ... since the start
    rollouts: dict[str, int] = field(default_factory=dict)  # by outcome, since the run began
    running: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # why -> how many
    rollouts_per_second: float = 0.0
    turns_per_second: float = 0.0
    tokens_per_second: float = 0.0
    latency: dict[str, float] = field(default_factory=dict)  # seconds, order to result: `p50`, ... `p99`
    waited: dict[str, float] = field(default_factory=dict)  # seconds from order to start
    held: int = 0  # calls that wait for a trainer's answer
    usage: Usage = NO_USAGE
    saved: Usage = NO_USAGE
    workers: int = 0
    draining: int = 0
    lost: int = 0  # workers that died or hung
    recycled: int = 0
    lag: float = 0.0
    memory: int = 0
    memory_limit: int = 0
    disk_free: int = 0
