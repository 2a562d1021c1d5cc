"""An accepted order and the progress of its rollouts, as a server shows them to clients. Pure state.

`run/orders/active_order.py` adds the engine's side, `testing/fake_orders.py` a test's.
"""

from __future__ import annotations

from .records import NO_USAGE, ModelUsage
from .serving_protocol import Order


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
