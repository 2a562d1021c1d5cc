"""The client of a server: rollouts and groups, asked for from async code or plain code.

`AsyncClient` is in `client.py`, the plain `Client` in `plain.py`; what they raise is in `errors.py`. The
records are those of `core/serving.py`; the server is in `serve/`.
"""

from ..core.groups import GroupTerms
from ..core.records import Ask, Instance
from ..core.serving import (
    Accepted,
    Answer,
    AnyEvent,
    Called,
    Dropped,
    Finished,
    Health,
    ModelChoice,
    Node,
    Order,
    Result,
    Rollout,
    Settled,
    Source,
    Started,
    Stats,
    Trajectories,
    Turned,
)
from .answering import Policy
from .calls import Call
from .client import AsyncClient, Events
from .errors import Busy, OrderRefused, ServerGone, Unauthorized
from .plain import Client

__all__ = [
    "Accepted",
    "Answer",
    "AnyEvent",
    "Ask",
    "AsyncClient",
    "Busy",
    "Call",
    "Called",
    "Client",
    "Dropped",
    "Events",
    "Finished",
    "GroupTerms",
    "Health",
    "Instance",
    "ModelChoice",
    "Node",
    "Order",
    "OrderRefused",
    "Policy",
    "Result",
    "Rollout",
    "ServerGone",
    "Settled",
    "Source",
    "Started",
    "Stats",
    "Trajectories",
    "Turned",
    "Unauthorized",
]
