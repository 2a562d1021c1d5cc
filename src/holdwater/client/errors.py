"""What a client raises. A rollout that failed is none of it: that is data, in its `Rollout`."""

from __future__ import annotations

from ..core.errors import HoldwaterError
from ..core.serving import Problem


class ServerGone(HoldwaterError):
    """Nobody answered for as long as the client had patience. The order may be sent again, with its key."""


class OrderRefused(HoldwaterError):
    """The server does not take this, however often it is sent."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.code


class Unauthorized(OrderRefused):
    """The server wants another key."""


class Busy(HoldwaterError):
    """The server has as much work as it takes; after `after` seconds it is worth trying again."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem
        self.after = problem.after
