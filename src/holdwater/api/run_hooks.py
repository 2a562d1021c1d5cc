"""Runs the library's calls: hooks of the caller, an event loop, and the start of the conductor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypedDict, TypeVar

import uvloop

from ..core.authoring import Agent, CriticFunction, ResourceWrapper, Suite
from ..core.records import Verdict
from ..core.summary import RunSummary
from ..gateway.upstreams.policy import Policy
from ..ledger.directory import RunDirectory as RunDirectory
from ..run.conductor.signals import CommandSignals
from ..run.execute import RunSetup, conduct_run
from ..run.setup.config import read_environment

T = TypeVar("T")

LAST_SECONDS = 2.0  # seconds that remaining tasks get to end


class RunHooks(TypedDict, total=False):
    """Hooks of a run: observers, output, signals and others."""

    observers: Sequence[Callable[[Verdict], None]]
    say: Callable[[str], None]
    signals: CommandSignals | None
    begun: Callable[[RunDirectory], None]  # called when the directory exists, before anything runs
    duties: Sequence[Any]
    enclose: ResourceWrapper | None  # wraps each resource that an attempt in this process opens
    policy: Policy | None  # answers model calls
    critic: CriticFunction | None  # the critic function of a resumed run


async def conduct_with_hooks(directory: RunDirectory, given: RunSetup, around: RunHooks) -> RunSummary:
    """Conduct the run in the directory, after the `begun` hook."""
    if begun := around.get("begun"):
        begun(directory)
    return await conduct_run(directory, given)


def make_setup(suite: Suite, agent: Agent, around: RunHooks) -> RunSetup:
    """Return the conductor's setup for a suite and an agent."""
    return RunSetup(
        suite=suite,
        agent=agent,
        environment=read_environment(),
        observers=around.get("observers", ()),
        say=around.get("say", lambda line: None),
        signals=around.get("signals"),
        periodic_tasks=around.get("duties", ()),
        enclose=around.get("enclose"),
        policy=around.get("policy"),
        critic=around.get("critic"),
    )


def complete(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on its own event loop. Tasks of agents that do not end are not awaited."""
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
    """Run `work` to its end, also if an event loop is already running, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return complete(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(complete(work))
        except BaseException as error:  # boundary: raised again in the caller's thread  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=body, name="holdwater")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
