"""Children of an attempt: other agents that borrow its sandbox and its model, and end before it does.

Children use their parent's lease and budget and request no resources of their own, so they never wait for
each other. `gateway/sessions.py` lends the model session; the parent's verdict records the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from ..agent.loader import load, python, takes_attempt
from ..core.authoring import Agent, AgentFunction, ChildResult, SessionStatus
from ..core.errors import AgentFailed, AttemptOver, LimitReached, as_failure, drop_tracebacks
from ..core.groups import make_cancel_failure
from ..core.masking import clean_text
from ..core.records import NO_USAGE, AttemptFailure, Instance
from ..core.serving_protocol import TrajectoryReference
from .attempt_rules import prefer_model_failure
from .attempt_services import AttemptServices
from .attempt_state import AttemptState
from .user_calls import being_cancelled
from .views import AttemptView, BlockingView, ModelView, SandboxView, adapt_arguments, mirror

MOST_CHILDREN = 64  # of an attempt at once, including children of children
DEEPEST = 4  # levels of children
LONGEST_NAME = 200


class ResourceLender(Protocol):
    """The parts of an attempt that its children need."""

    state: AttemptState
    services: AttemptServices

    def view_sandbox(self, env: Mapping[str, str]) -> SandboxView:
        """Return another view of its sandbox, with variables of the agent's commands."""

    def view_model(self, session: SessionStatus | None, instance: Instance, child: int) -> ModelView:
        """Return a view of its model through a session; each child gets a different seed."""


class LentResources(NamedTuple):
    """The resources that an attempt or a child has and can lend."""

    instance: Instance
    session: SessionStatus | None
    sandbox: bool = True
    model: bool = True
    name: str = ""  # under which its model calls are recorded
    depth: int = 0


class ChildSpawner(AttemptView):
    """Implements `core.authoring.AttemptHandle` for one owner. Leaving `async with` ends the children."""

    def __init__(self, lender: ResourceLender, loan: LentResources) -> None:
        super().__init__()
        self._owner: tuple[ResourceLender, LentResources] | None = lender, loan
        self._tasks: set[asyncio.Task[ChildResult]] = set()  # bound: MOST_CHILDREN, and refused ones

    async def __aenter__(self) -> ChildSpawner:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for task in self._tasks:
            _cancel(task)
        if self._tasks:
            await asyncio.wait(set(self._tasks))  # soon: `UserCalls` abandons code that ignores it
        self._owner = None

    @property
    def reference(self) -> TrajectoryReference:
        """See `core.authoring.AttemptHandle`."""
        lender, _ = self._require_owner()
        return lender.services.locate_record(lender.state.job.attempt.id)

    async def spawn(
        self,
        agent: str | AgentFunction | Agent,
        instruction: str | None = None,
        *,
        name: str = "",
        sandbox: bool = True,
        model: bool = True,
        timeout: float | None = None,
    ) -> ChildResult:
        """See `core.authoring.AttemptHandle`."""
        loaded = await self._load_agent(agent)
        lender, has = self._require_owner()
        instance, name = has.instance, name or loaded.name
        if instruction is not None:
            instance = msgspec.structs.replace(instance, instruction=instruction)
        loan = LentResources(
            instance=instance,
            session=has.session,
            sandbox=sandbox and has.sandbox,
            model=model and has.model,
            name=clean_text(f"{has.name}/{name}" if has.name else name)[:LONGEST_NAME],
            depth=has.depth + 1,
        )
        return await self._await_child(self._run_child(loaded, lender, loan, timeout))

    def as_blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingHandle:
        return BlockingHandle(self, loop)

    async def _load_agent(self, agent: str | AgentFunction | Agent) -> Agent:
        if isinstance(agent, Agent):
            return agent
        if not isinstance(agent, str):
            return python(agent)
        lender, _ = self._require_owner()
        found: Agent = await lender.state.calls.call(load, agent)  # in a thread: it may read from disk
        return found

    async def _await_child(self, work: Any) -> ChildResult:
        """Run a child and return its result. Cancelling the caller cancels the child."""
        task: asyncio.Task[ChildResult] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.done() and not being_cancelled():
                raise AttemptOver("the attempt is over, and so are its children") from None
            _cancel(task)
            await asyncio.wait({task})
            raise

    async def _run_child(
        self, agent: Agent, lender: ResourceLender, loan: LentResources, timeout: float | None
    ) -> ChildResult:
        """Run a child from start to end. Its result is recorded however it ends."""
        state, loop = lender.state, asyncio.get_running_loop()
        phase, begun = state.phase, loop.time()
        if (refusal := _find_refusal(state, loan)) is not None:
            return ChildResult(failure=refusal)
        number, answer, session = state.child_tracker.begin(), None, None
        failure: AttemptFailure | None = make_cancel_failure("parent", "its parent stopped waiting for it")
        try:
            async with AsyncExitStack() as stack:
                if loan.model and loan.session is not None:
                    session = await stack.enter_async_context(lender.services.lend(loan.session, loan.name))
                loan = loan._replace(session=session)
                async with state.limit(lambda: timeout, phase) if timeout is not None else nullcontext():
                    answer = await self._act(agent, lender, loan, number, stack)
            failure = prefer_model_failure(None, session)
        except Exception as error:  # boundary: the parent decides about a child's failure  # noqa: BLE001
            failure = prefer_model_failure(as_failure(error, AgentFailed, phase), session)
            drop_tracebacks(error)
        finally:
            result = ChildResult(answer=answer, failure=failure, usage=session.usage if session else NO_USAGE)
            count = session.exchanges if session else 0
            state.child_tracker.end(loan.name, result, count, loop.time() - begun)
        return result

    async def _act(
        self, agent: Agent, lender: ResourceLender, loan: LentResources, number: int, stack: AsyncExitStack
    ) -> Any:
        """Call the agent with views that end with the child; using a resource that was not lent raises."""
        sandbox = lender.view_sandbox(lender.services.agent_env)
        model = lender.view_model(loan.session, loan.instance, number)
        if not loan.sandbox:
            none: Any = _WithheldResource("sandbox")
            sandbox = SandboxView(none, none, lender.state.disk_faults, none)
        if not loan.model:
            model = ModelView(_WithheldResource("model"), model.seed)
        for view in (sandbox, model):
            stack.callback(view.end)
        own = None
        if takes_attempt(agent.act):
            own = await stack.enter_async_context(ChildSpawner(lender, loan))
        return await call_agent(lender.state, agent, loan.instance, (sandbox, model), own)

    def _require_owner(self) -> tuple[ResourceLender, LentResources]:
        if self._over or self._owner is None:
            raise AttemptOver("the attempt is over, and has no children any more")
        return self._owner


class BlockingHandle(BlockingView[ChildSpawner]):
    """An `AttemptHandle` for a thread."""

    spawn = mirror(ChildSpawner.spawn)


async def call_agent(
    state: AttemptState,
    agent: Agent,
    instance: Instance,
    views: tuple[SandboxView | None, ModelView | None],
    parent: ChildSpawner | None,
) -> Any:
    """Call the agent and return its answer; `parent` is passed to an agent with a parameter `attempt`."""
    arguments = adapt_arguments(agent.act, instance, *views)
    if parent is None:
        return await state.calls.call(agent.act, *arguments)
    (own,) = adapt_arguments(agent.act, parent)
    return await state.calls.call(agent.act, *arguments, attempt=own)


def _cancel(task: asyncio.Task[ChildResult]) -> None:
    """Cancel a child once: a second cancellation would interrupt its clean-up."""
    if not task.cancelling():
        task.cancel()


class _WithheldResource:
    """Stands in for a resource that was not lent: any use raises `AgentFailed`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise AgentFailed(f"no {self._what} was lent to this child", kind="withheld")

    def __call__(self, *arguments: Any) -> Any:
        raise AgentFailed(f"no {self._what} was lent to this child", kind="withheld")


def _find_refusal(state: AttemptState, loan: LentResources) -> AttemptFailure | None:
    if loan.depth > DEEPEST:
        error = LimitReached(f"children can be nested at most {DEEPEST} levels deep", kind="depth")
    elif state.child_tracker.living >= MOST_CHILDREN:
        error = LimitReached(f"an attempt can have at most {MOST_CHILDREN} children at once", kind="children")
    else:
        return None
    return as_failure(error, LimitReached, state.phase)
