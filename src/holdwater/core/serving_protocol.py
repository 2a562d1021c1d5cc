"""The messages between clients and the server: one versioned schema, as JSON or msgpack.

A client sends an `Order` and receives an `OrderResult`, with an `OrderEvent` for each step in between. The
server is in `serve/`, the client in `client/`. `OrderProgress` is an accepted order as a server shows it to
clients: `run/orders/active_order.py` adds the engine's side, `testing/fake_orders.py` a test's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import field

from .endpoints import EndpointUse
from .groups import GroupTerms
from .records import (
    NO_USAGE,
    AttemptFailure,
    ChildAttempt,
    Instance,
    LimitOverrides,
    ModelUsage,
    PhaseTimes,
    Record,
)
from .token_sequences import (
    PackedSequence,
    SequenceStart,
    TokenSequence,
    build_sequences,
    unpack_sequences,
)

PROTOCOL = 1
LONGEST_KEY = 200  # characters of an idempotency key
# Newest calls of a rollout that a client keeps: later calls may refer to them as their parent.
KEPT_CALLS = 16


class ModelSource(StrEnum):
    """The source of the replies to the model calls of a rollout."""

    RUN = "run"  # the server's own model, or the one set by the latest `SteerRequest`
    ENDPOINT = "endpoint"  # a model server that the client chose for this order
    FUNCTION = "function"  # the server's `--policy`: a Python function that runs in the worker
    TRAINER = "trainer"  # the client itself: it receives `Called` events and replies with a `CallAnswer`


class ModelChoice(Record, frozen=True):
    """The model of an order.

    The key of an endpoint is not part of it: a header carries the key, which is never stored.
    """

    source: ModelSource = ModelSource.RUN
    url: str | None = None  # base URL of an endpoint (`.../v1`)
    name: str | None = None  # name of the model; None: the name in the agent's request
    version: str = ""  # version of an endpoint's weights, written to every exchange


class TrajectoryForm(StrEnum):
    """The form in which a result carries the conversation."""

    NODES = "nodes"
    TOKENS = "tokens"  # packed token sequences, without messages: `Rollout.sequences`
    REFERENCE = "reference"  # its location on the server's disk, for `holdwater.read`
    NONE = "none"


_CARRIED_FORMS = (TrajectoryForm.NODES, TrajectoryForm.TOKENS)  # the result names the versions


class StaleAction(StrEnum):
    """The effect of `max_staleness` on a rollout that is staler."""

    FLAG = "flag"  # `Rollout.stale` is set
    DROP = "drop"  # its reward and trajectory are left out as well


class Order(Record, frozen=True):
    """One rollout, or a group of `size`. Sending the same key again addresses the same order."""

    key: str
    instance: str | Instance  # the id of an instance of the suite, or a whole instance
    protocol: int = PROTOCOL
    size: int = 1
    group: GroupTerms | None = None  # None: `size` independent rollouts
    model: ModelChoice = ModelChoice()
    sampling: dict[str, Any] = field(default_factory=dict)  # imposed on every request
    limits: LimitOverrides = LimitOverrides()
    trajectory: TrajectoryForm = TrajectoryForm.NODES
    detached: bool = False  # the order continues without its client, and the result is kept for it
    turns: bool = False  # whether `Turned` events are sent
    # By how many versions of the policy the oldest reply may be behind the newest that the server knows.
    max_staleness: int | None = None
    when_stale: StaleAction = StaleAction.FLAG

    def __post_init__(self) -> None:
        if not self.key or len(self.key) > LONGEST_KEY or not self.key.isprintable():
            raise ValueError(f"`key` must have 1 to {LONGEST_KEY} printable characters")
        if self.size < 1:
            raise ValueError(f"`size` must be at least 1: {self.size}")
        if (self.model.source is ModelSource.ENDPOINT) != (self.model.url is not None):
            raise ValueError("`model.url` is required for the source `endpoint` and not allowed for others")
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ValueError(f"`max_staleness` must be at least 0: {self.max_staleness}")
        if self.max_staleness is not None and self.trajectory not in _CARRIED_FORMS:
            raise ValueError("`max_staleness` needs `trajectory` to be `tokens` or `nodes`")


class SteerRequest(Record, frozen=True):
    """Route the calls of orders with the source `run` to this endpoint, also those of running rollouts."""

    url: str
    name: str | None = None
    version: str = ""


class MessageNode(Record, frozen=True):
    """A message of a conversation. Conversations with a common beginning share their first nodes."""

    id: int  # 0, 1, 2, ... within the rollout
    parent: int | None  # id of the previous message
    role: str
    message: Any  # as sent, in its dialect; media are references to the run's blobs
    exchange: int  # number of the exchange in which it first appeared
    dialect: str = "chat"
    sampled: bool = False  # the model generated it: a trainer trains on these messages (the mask)
    tokens: tuple[int, ...] | None = None  # ids, if the upstream provides them
    # For a sampled message: its prompt has the first `shared` ids of the prompt and tokens of the node
    # `follows`, and then these. None: the upstream sent no ids of the prompt.
    prompt_delta: tuple[int, ...] | None = None
    follows: int | None = None
    shared: int = 0
    # Why a token sequence begins with its prompt; None: the prompt continues the sequence of `follows`.
    sequence_start: SequenceStart | None = None
    # One for each token; None: the upstream sent none, or no finite number (JSON has neither NaN nor
    # infinity).
    logprobs: tuple[float | None, ...] | None = None
    version: str = ""  # version of the policy that generated it
    finish: str = ""
    by: str = ""  # the child attempt that made the call; empty: the attempt itself


class TrajectoryReference(Record, frozen=True):
    """The location of a conversation: `holdwater.read(directory)` reads it."""

    directory: str
    attempt: int


class Rollout(Record, frozen=True):
    """One finished rollout."""

    instance: str
    sample: int
    member: int  # 0, 1, 2, ... within the order
    outcome: str  # `passed`, `failed`, or the origin of its failure
    attempt: int  # the attempt that determined the outcome; 0: none was started
    reward: float | None = None  # its score; None: it was not scored
    failure: AttemptFailure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    detail: str = ""
    answer: Any = None
    usage: ModelUsage = NO_USAGE
    saved: ModelUsage = NO_USAGE  # usage of replies that came from the record, which were not paid for again
    times: PhaseTimes = PhaseTimes()
    exchanges: int = 0
    children: tuple[ChildAttempt, ...] = ()
    trajectory: tuple[MessageNode, ...] | None = None
    reference: TrajectoryReference | None = None
    tokens: tuple[PackedSequence, ...] | None = None
    unknown_replies: int = 0  # replies without ids, or without those of their prompt: they are in no sequence
    staleness: int | None = None  # see `Order.max_staleness`; None: its versions are not known, or no numbers
    stale: bool = False  # staler than the order allows

    def sequences(self) -> list[TokenSequence]:
        """Return the token sequences of the trajectory; none if it is not part of the result."""
        if self.tokens is not None:
            return unpack_sequences(self.tokens)
        return build_sequences(self.trajectory or ())


class OrderResult(Record, frozen=True):
    """The result of an order."""

    key: str
    order: int
    rollouts: tuple[Rollout, ...]  # as many as the order's `size`
    protocol: int = PROTOCOL
    together: bool = False  # whether the group was scored together
    new: bool = True  # False: this result has been delivered before
    replaced: tuple[Rollout, ...] = ()  # members of a group that failed for good and were replaced


class ProblemDetails(Record, frozen=True):
    """The reason for a refused request: the body of every error."""

    code: str  # see `docs/serving.md`
    message: str
    hint: str = ""
    after: float = 0.0  # seconds to wait before a retry is useful


class OrderEvent(Record, frozen=True, tag_field="event", tag=str.lower):
    """A step of an order; `member` identifies the rollout within the order."""


class Accepted(OrderEvent, frozen=True):
    """The order is committed to the ledger."""

    order: int
    protocol: int = PROTOCOL
    new: bool = True  # False: the order existed already and continues


class Started(OrderEvent, frozen=True):
    member: int
    attempt: int


class Turned(OrderEvent, frozen=True):
    """New turns are recorded.

    `usage` is the attempt's usage so far, `nodes` are the messages since the previous event.
    """

    member: int
    attempt: int
    turns: int
    usage: ModelUsage = NO_USAGE
    nodes: tuple[MessageNode, ...] = ()


class Called(OrderEvent, frozen=True):
    """The agent makes a model call that the client has to answer.

    The event carries only the new part of the request. The messages of the request are the first `keep`
    messages of the call `parent`, followed by `append`. The other keys are in `head`; if `head` is None,
    they equal those of `parent`.
    """

    member: int
    call: str  # id of the call, repeated in the `CallAnswer`
    dialect: str
    append: tuple[str, ...]  # each a message, as JSON
    parent: str | None = None
    keep: int = 0
    head: str | None = None  # as JSON
    streamed: bool = False  # whether the agent requested a stream: the gateway makes one from the answer


class Dropped(OrderEvent, frozen=True):
    """The call needs no answer any more: its agent has stopped waiting."""

    member: int
    call: str


class Settled(OrderEvent, frozen=True):
    """A member is closed; the result follows when all members are."""

    member: int
    outcome: str
    reward: float | None = None


class Finished(OrderEvent, frozen=True):
    result: OrderResult


AnyOrderEvent = Accepted | Started | Turned | Called | Dropped | Settled | Finished


class CallAnswer(Record, frozen=True):
    """The client's answer to a call: exactly one of `text`, `reply` and `error`."""

    call: str
    text: str | None = None
    # A `chat.completion`, its message, or a whole reply in the dialect of the call.
    reply: dict[str, Any] | None = None
    error: str | None = None  # the call fails with this
    version: str = ""  # version of the policy that generated the answer

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.text, self.reply, self.error)) != 1:
            raise ValueError("a call answer must have exactly one of `text`, `reply` and `error`")


class ServerHealth(Record, frozen=True):
    """Whether the server accepts orders and can run them."""

    ok: bool  # it accepts orders, and a worker is ready for them
    state: str  # `starting`, `serving`, `degraded`, `draining`, `broken`
    reason: str = ""  # why the state is not `serving`
    ready: int = 0  # workers
    wanted: int = 0
    running: int = 0
    waiting: int = 0
    protocol: int = PROTOCOL


class TokenFigures(Record, frozen=True):
    """The tokens of the rollouts that were delivered with tokens or nodes, since the server started."""

    replies: int = 0  # with ids: each is in one sequence
    unknown: int = 0  # replies without ids, or without those of their prompt
    sampled: int = 0  # tokens
    starts: dict[str, int] = field(default_factory=dict)  # sequences, by the reason why they begin
    # The share of the replies that could continue a sequence and began another one: see `SequenceStart`.
    breaks: float = 0.0
    version: int | None = None  # the newest of the policy
    staleness: dict[str, float] = field(
        default_factory=dict
    )  # versions behind it, recent rollouts: `p50`, ...
    stale: int = 0  # rollouts beyond the `max_staleness` of their order


class ServerStats(Record, frozen=True):
    """Measurements of a server by itself. Rates cover the last minute."""

    at: float
    uptime: float
    health: ServerHealth
    orders: dict[str, int] = field(default_factory=dict)  # `open`, `accepted`, `refused`, ... since the start
    rollouts: dict[str, int] = field(default_factory=dict)  # by outcome, since the run began
    running: int = 0
    waiting: dict[str, int] = field(default_factory=dict)  # reason -> rollouts
    rollouts_per_second: float = 0.0
    turns_per_second: float = 0.0
    tokens_per_second: float = 0.0
    latency: dict[str, float] = field(default_factory=dict)  # seconds, order to result: `p50`, ... `p99`
    waited: dict[str, float] = field(default_factory=dict)  # seconds from order to start
    held: int = 0  # calls that wait for an answer from a trainer
    endpoints: tuple[EndpointUse, ...] = ()  # the servers of the run's model, if there are several
    tokens: TokenFigures = TokenFigures()
    usage: ModelUsage = NO_USAGE
    saved: ModelUsage = NO_USAGE
    workers: int = 0
    draining: int = 0
    lost: int = 0  # workers that died or hung
    recycled: int = 0
    lag: float = 0.0
    memory: int = 0
    memory_limit: int = 0
    disk_free: int = 0


class RolloutProgress:
    """The progress of one rollout of an order."""

    def __init__(self, member: int, sample: int) -> None:
        self.member = member
        self.sample = sample
        self.attempt = 0  # 0: not begun yet
        self.turns = 0
        self.usage = NO_USAGE
        self.calls: dict[str, None] = {}  # held calls, oldest first; bound: the calls its agent has in flight
        self.outcome: str | None = None
        self.reward: float | None = None

    def begin(self, attempt: int) -> None:
        """Begin another attempt: the progress of the one before is void."""
        self.attempt = attempt
        self.turns = 0
        self.usage = NO_USAGE
        self.calls.clear()

    def advance(self, turns: int, usage: ModelUsage) -> None:
        self.turns, self.usage = turns, usage

    def close(self, outcome: str, reward: float | None) -> None:
        self.outcome, self.reward = outcome, reward
        self.calls.clear()


class OrderProgress:
    """An accepted order and its rollouts."""

    def __init__(self, order: Order, owner: str) -> None:
        self.order = order
        self.owner = owner  # the client that may access it
        self.id = 0  # until it is in the ledger
        self.new = True  # False: it was known when it was placed
        self.members: list[RolloutProgress] = []  # bound: the order's size, and its replacements
        self.version = 0  # grows with every change

    @property
    def finished(self) -> bool:
        """Whether every member is closed."""
        return bool(self.members) and all(member.outcome is not None for member in self.members)

    def mark_known(self) -> None:
        """Note that its client placed the order again."""
        self.new = False
