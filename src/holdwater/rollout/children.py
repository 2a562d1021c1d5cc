"""Children of an attempt: other agents that borrow its sandbox and its model, and end before it does.

They spend their parent's lease and its budget and ask nobody for anything, so that none waits for another.
A model session is lent by `gateway/sessions.py`; what became of them is in their parent's verdict.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from ..agent.load import load
from ..agent.python import python, takes_attempt
from ..core.authoring import Act, Agent, Born, Session
from ..core.errors import AgentFailed, AttemptOver, LimitReached, as_failure, let_go
from ..core.groups import cancelled
from ..core.records import NO_USAGE, Failure, Instance
from ..core.text import clean_text
from .calls import being_cancelled
from .ends import model_first
from .life import Life
from .limit import PhaseLimit
from .place import Place
from .views import ModelView, SandboxView, View, for_caller, wait_for

MOST_CHILDREN = 64  # of an attempt at once, its children's own included
DEEPEST = 4  # a child of a child of a child of a child
LONGEST_NAME = 200


class Lender(Protocol):
    """An attempt, as far as its children need it."""

    life: Life
    place: Place

    def seen(self) -> SandboxView:
        """Another view of its sandbox."""

    def modelled(self, session: Session | None, instance: Instance, child: int) -> ModelView:
        """A view of its model by a session; no two children have the same seed."""


class Means(NamedTuple):
    """What an attempt or a child has, and can lend."""

    instance: Instance
    session: Session | None
    sandbox: bool = True
    model: bool = True
    name: str = ""  # by which its calls are recorded
    depth: int = 0


class Children(View):
    """Implements `core.authoring.Parent` for one owner, whose children the end of this block ends."""

    def __init__(self, lender: Lender, means: Means) -> None:
        super().__init__()
        self._owner: tuple[Lender, Means] | None = lender, means
        self._tasks: set[asyncio.Task[Born]] = set()  # bound: MOST_CHILDREN, and who is being refused

    async def __aenter__(self) -> Children:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        for task in self._tasks:
            _cancel(task)
        if self._tasks:
            await asyncio.wait(set(self._tasks))  # soon: `Calls` gives up on what ignores its cancellation
        self._owner = None

    async def child(
        self,
        agent: str | Act | Agent,
        instruction: str | None = None,
        *,
        name: str = "",
        sandbox: bool = True,
        model: bool = True,
        timeout: float | None = None,
    ) -> Born:
        """See `core.authoring.Parent`."""
        made = await self._found(agent)
        lender, has = self._alive()
        instance = has.instance
        if instruction is not None:
            instance = msgspec.structs.replace(instance, instruction=instruction)
        means = Means(
            instance=instance,
            session=has.session,
            sandbox=sandbox and has.sandbox,
            model=model and has.model,
            name=_named(has.name, name or made.name),
            depth=has.depth + 1,
        )
        return await self._awaited(self._live(made, lender, means, timeout))

    def blocking(self, loop: asyncio.AbstractEventLoop) -> BlockingParent:
        return BlockingParent(self, loop)

    async def _found(self, agent: str | Act | Agent) -> Agent:
        if isinstance(agent, Agent):
            return agent
        if not isinstance(agent, str):
            return python(agent)
        lender, _ = self._alive()
        found: Agent = await lender.life.calls.call(load, agent)  # it may have to be read from disk
        return found

    async def _awaited(self, work: Any) -> Born:
        """What a child comes to. It ends with whoever waits for it."""
        task: asyncio.Task[Born] = asyncio.get_running_loop().create_task(work)
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

    async def _live(self, agent: Agent, lender: Lender, means: Means, timeout: float | None) -> Born:
        """From its birth to its end; how it ended is in the record, whatever that was."""
        life, loop = lender.life, asyncio.get_running_loop()
        phase, begun = life.phase, loop.time()
        if (refusal := _refused(life, means)) is not None:
            return Born(failure=refusal)
        number, answer, session = life.brood.begin(), None, None
        failure: Failure | None = cancelled("parent", "nobody waited for it any longer")
        try:
            async with AsyncExitStack() as stack:
                if means.model and means.session is not None:
                    session = await stack.enter_async_context(lender.place.lend(means.session, means.name))
                means = means._replace(session=session)
                async with PhaseLimit(lambda: timeout, phase) if timeout is not None else nullcontext():
                    answer = await self._act(agent, lender, means, number, stack)
            failure = model_first(None, session)
        except Exception as error:  # boundary: a child's failure is its parent's to judge  # noqa: BLE001
            failure = model_first(as_failure(error, AgentFailed, phase), session)
            let_go(error)
        finally:
            born = Born(answer=answer, failure=failure, usage=session.usage if session else NO_USAGE)
            count = session.exchanges if session else 0
            life.brood.end(means.name, born, count, loop.time() - begun)
        return born

    async def _act(
        self, agent: Agent, lender: Lender, means: Means, number: int, stack: AsyncExitStack
    ) -> Any:
        """Act with views that end with the child; what was not lent raises."""
        sandbox, model = lender.seen(), lender.modelled(means.session, means.instance, number)
        if not means.sandbox:
            none: Any = _Withheld("sandbox")
            sandbox = SandboxView(none, none, lender.life.hurt, none)
        if not means.model:
            model = ModelView(_Withheld("model"), model.seed)
        for view in (sandbox, model):
            stack.callback(view.end)
        own = None
        if takes_attempt(agent.act):
            own = await stack.enter_async_context(Children(lender, means))
        return await act(lender.life, agent, means.instance, (sandbox, model), own)

    def _alive(self) -> tuple[Lender, Means]:
        if self._over or self._owner is None:
            raise AttemptOver("the attempt is over, and has no children any more")
        return self._owner


class BlockingParent:
    """A `Parent` for a thread."""

    def __init__(self, view: Children, loop: asyncio.AbstractEventLoop) -> None:
        self._view = view
        self._loop = loop

    def child(self, agent: str | Act | Agent, instruction: str | None = None, **terms: Any) -> Born:
        return wait_for(self._view, self._view.child(agent, instruction, **terms), self._loop)


async def act(
    life: Life,
    agent: Agent,
    instance: Instance,
    views: tuple[SandboxView | None, ModelView | None],
    parent: Children | None,
) -> Any:
    """What the agent answers; `parent` is for one that has a parameter `attempt`."""
    arguments = for_caller(agent.act, instance, *views)
    if parent is None:
        return await life.calls.call(agent.act, *arguments)
    (own,) = for_caller(agent.act, parent)
    return await life.calls.call(agent.act, *arguments, attempt=own)


def _cancel(task: asyncio.Task[Born]) -> None:
    """Once: a second time would break off how it ends."""
    if not task.cancelling():
        task.cancel()


class _Withheld:
    """In the place of what was not lent."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise AgentFailed(f"no {self._what} was lent to this child", kind="withheld")

    def __call__(self, *arguments: Any) -> Any:
        raise AgentFailed(f"no {self._what} was lent to this child", kind="withheld")


def _named(parent: str, name: str) -> str:
    """Names are data; a child's child carries both."""
    return clean_text(f"{parent}/{name}" if parent else name)[:LONGEST_NAME]


def _refused(life: Life, means: Means) -> Failure | None:
    if means.depth > DEEPEST:
        error = LimitReached(f"children are at most {DEEPEST} deep", kind="depth")
    elif life.brood.living >= MOST_CHILDREN:
        error = LimitReached(f"an attempt has at most {MOST_CHILDREN} children at once", kind="children")
    else:
        return None
    return as_failure(error, LimitReached, life.phase)
