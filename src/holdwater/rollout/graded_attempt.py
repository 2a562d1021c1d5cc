"""The view of an attempt that its grader gets: how the agent ended, its record, and a model for a judge.

`attempt_phases.py` opens it around the call of a suite's `grade`; a member of a group has the same in
`group.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from ..core.authoring import SessionStatus
from ..core.errors import AttemptOver
from ..core.exchange import GRADER_BORROWER
from ..core.records import AttemptFailure, ModelUsage
from ..core.serving_protocol import MessageNode, TrajectoryReference
from .attempt_state import AttemptState
from .children import ResourceLender
from .views import AttemptView, BlockingModel, BlockingView, ModelView, mirror

ReadNodes = Callable[[], Awaitable[list[MessageNode]]]


class GradedAttemptView(AttemptView):
    """Implements `core.authoring.GradedAttempt` while its grader runs."""

    def __init__(
        self, state: AttemptState, model: ModelView, reference: TrajectoryReference, read: ReadNodes
    ) -> None:
        super().__init__()
        self.answer = state.answer
        self.failure: AttemptFailure | None = state.failure
        self.grouped = state.job.attempt.group is not None
        self.usage: ModelUsage = state.agent_usage  # of the agent: the grader has made no call yet
        self.reference = reference
        self.model = model
        self._read: ReadNodes | None = read

    async def nodes(self) -> list[MessageNode]:
        """See `core.authoring.AgentRecord`."""
        if self._read is None:
            raise AttemptOver("the grading is over")
        return await self._read()

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingGradedAttempt:
        return BlockingGradedAttempt(self, loop)

    def end(self) -> None:
        super().end()
        self.model.end()
        self._read = self.answer = None


@asynccontextmanager
async def open_graded_attempt(
    lender: ResourceLender, session: SessionStatus | None
) -> AsyncIterator[GradedAttemptView]:
    """Open the view with a model session of its own, which the limits of the agent do not bind."""
    state, services = lender.state, lender.services
    async with state.scope.inner() as scope:
        if session is not None:
            lent = services.lend(session, GRADER_BORROWER, limited=False)
            session = await scope.open("grader session", lent)
        read = partial(state.calls.call, services.read_nodes, state.acting_attempt)
        reference = services.locate_record(state.acting_attempt)
        view = GradedAttemptView(state, lender.view_model(session, state.instance, 0), reference, read)
        try:
            yield view
        finally:
            view.end()


class BlockingGradedAttempt(BlockingView[GradedAttemptView]):
    """A `GradedAttemptView` for a thread."""

    nodes = mirror(GradedAttemptView.nodes)

    @property
    def model(self) -> BlockingModel:
        return self._view.model.as_blocking(self._loop)
