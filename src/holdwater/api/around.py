"""What surrounds every call of the library: who watches, a loop to run on, and the conductor's start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, TypeVar

import uvloop

from ..core.authoring import Agent, Critique, Enclose, Suite
from ..core.records import Verdict
from ..core.summary import Summary
from ..gateway.upstreams.policy import Policy
from ..ledger.directory import RunDirectory
from ..run.config import environment
from ..run.execute import Conduct, conduct
from ..run.signals import Signals

T = TypeVar("T")

LAST_SECONDS = 2.0  # what tasks that are left over get to end


class Around(TypedDict, total=False):
    """What surrounds a run: who watches, who is told, who hears signals."""

    observers: Sequence[Callable[[Verdict], None]]
    say: Callable[[str], None]
    signals: Signals | None
    begun: Callable[[RunDirectory], None]  # called when the directory exists, before anything runs
    duties: Sequence[Any]
    enclose: Enclose | None  # what surrounds each thing that an attempt in this process opens
    policy: Policy | None  # what answers model calls
    critic: Critique | None  # a function that a run which goes on was given


async def conducted(directory: RunDirectory, given: Conduct, around: Around) -> Summary:
    """Conduct what is in the directory; whoever waits for that is told before."""
    if begun := around.get("begun"):
        begun(directory)
    return await conduct(directory, given)


def given_to(suite: Suite, agent: Agent, around: Around) -> Conduct:
    """What a conductor is given for a suite and an agent."""
    return Conduct(
        suite=suite,
        agent=agent,
        environment=environment(),
        observers=around.get("observers", ()),
        say=around.get("say", lambda line: None),
        signals=around.get("signals"),
        duties=around.get("duties", ()),
        enclose=around.get("enclose"),
        policy=around.get("policy"),
        critic=around.get("critic"),
    )


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop of its own. Tasks of agents that refuse to end are not waited for."""
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(_cancel_others(loop))
        loop.close()


async def _cancel_others(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=LAST_SECONDS)


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, also where a loop is running already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return complete(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(complete(work))
        except BaseException as error:  # boundary: raised again by the caller  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=body, name="holdwater")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
