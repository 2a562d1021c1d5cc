"""The exceptions of the client. A failed rollout raises none: its failure is data, in its `Rollout`."""

from __future__ import annotations

from ..core.errors import HoldwaterError
from ..core.serving_protocol import ProblemDetails


class ServerGone(HoldwaterError):
    """The server did not respond within the client's `patience`. The order can be sent again with its key."""


class OrderRefused(HoldwaterError):
    """The server rejects this request; sending it again does not help."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem

    @property
    def code(self) -> str:
        return self.problem.code


class AccessRefused(OrderRefused):
    """The server rejects the API key."""


class ServerBusy(HoldwaterError):
    """The server accepts no more work for now; retry after `after` seconds."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.message, problem.hint)
        self.problem = problem
        self.after = problem.after
