"""The client of a rollout server: orders rollouts and groups, from async or from blocking code.

`AsyncClient` is in `async_client.py`, the blocking `Client` in `blocking_client.py`, and their exceptions in
`server_connection.py`. `core/serving_protocol.py` defines the records; `serve/` is the server.
"""

from ..core.groups import GroupTerms
from ..core.records import Instance, LimitOverrides
from ..core.serving_protocol import (
    Accepted,
    AnyOrderEvent,
    CallAnswer,
    Called,
    Dropped,
    Finished,
    MessageNode,
    ModelChoice,
    ModelSource,
    Order,
    OrderResult,
    Rollout,
    ServerHealth,
    ServerStats,
    Settled,
    StaleAction,
    Started,
    TokenFigures,
    TrajectoryForm,
    Turned,
)
from ..core.token_sequences import (
    SampledTurn,
    SequenceStart,
    TokenSequence,
    TokenSpan,
    build_sequences,
)
from .async_client import AsyncClient, OrderStream
from .blocking_client import Client
from .policy import Policy, PolicyCall
from .server_connection import AccessRefused, OrderRefused, ServerBusy, ServerGone
from .token_policy import CallBatcher, SampledTokens, TokenPolicy, TokenPrompt

__all__ = [
    "Accepted",
    "AccessRefused",
    "AnyOrderEvent",
    "AsyncClient",
    "CallAnswer",
    "CallBatcher",
    "Called",
    "Client",
    "Dropped",
    "Finished",
    "GroupTerms",
    "Instance",
    "LimitOverrides",
    "MessageNode",
    "ModelChoice",
    "ModelSource",
    "Order",
    "OrderRefused",
    "OrderResult",
    "OrderStream",
    "Policy",
    "PolicyCall",
    "Rollout",
    "SampledTokens",
    "SampledTurn",
    "SequenceStart",
    "ServerBusy",
    "ServerGone",
    "ServerHealth",
    "ServerStats",
    "Settled",
    "StaleAction",
    "Started",
    "TokenFigures",
    "TokenPolicy",
    "TokenPrompt",
    "TokenSequence",
    "TokenSpan",
    "TrajectoryForm",
    "Turned",
    "build_sequences",
]
