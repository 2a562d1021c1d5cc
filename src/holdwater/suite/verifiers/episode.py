"""Plays the `run` of an environment with one agent: it drives the turns of a harness, segment by segment.

Such an environment plays the user: it steps a game or a server in the worker, and answers the agent with an
observation. `harness.py` opens the harness in the attempt's sandbox; `scoring.py` adds the task's rewards to
those that `run` records.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.agent import Interaction

from ...core.errors import AgentFailed, AttemptError, SandboxFailed
from .scoring import OpenTask


class HarnessRollout:
    """The rollout behind an `Interaction`: a step is one segment of the harness, read from the record."""

    def __init__(self, opened: OpenTask, session: Any, refresh: Callable[[], Awaitable[None]]) -> None:
        self.trace = opened.trace
        self.closed = False
        self.failure: vf.RolloutError | None = None  # of the harness; the environment decides what follows
        self._session = session
        self._refresh = refresh

    @property
    def ok(self) -> bool:
        return self.failure is None and self.trace.stop_condition is None

    async def step(self, messages: Any = None, *, on_input: Any = None) -> bool:
        """Run one segment; return whether the exchange can continue."""
        turns = self.trace.num_turns
        try:
            await self._session.turn(messages)
        except vf.RolloutError as error:
            self.failure = error
        await self._refresh()
        return self.ok and self.trace.num_turns > turns

    async def steer(self, message: str, *, message_id: str | None = None) -> dict[str, str]:
        return {"outcome": "promptRequired", "reason": "noRunningTurn"}

    async def close(self) -> Any:
        """End the exchange. The task is scored when the attempt is graded."""
        self.closed = True
        await self._session.close()
        return self.trace


class SeatedAgent:
    """The one agent of an environment. It plays its task once, in the attempt's sandbox."""

    def __init__(self, opened: OpenTask, rollout: HarnessRollout) -> None:
        self.trainable = True
        self._opened = opened
        self._rollout: HarnessRollout | None = rollout

    async def run(self, task: Any) -> Any:
        rollout = self._begin(task)
        await rollout.step()
        return await rollout.close()

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Interaction]:
        interaction = Interaction(self._begin(task))
        try:
            yield interaction
        finally:
            await interaction.close()

    def _begin(self, task: Any) -> HarnessRollout:
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            raise AgentFailed("the environment runs its agent more than once", kind="task", again=False)
        if task is not self._opened.task:
            raise AgentFailed("the environment gives its agent another task", kind="task", again=False)
        return rollout


class SeatedAgents:
    """The agents of an environment by their names, as its `run` gets them."""

    def __init__(self, seat: str, agent: SeatedAgent) -> None:
        setattr(self, seat, agent)


async def play_episode(opened: OpenTask, rollout: HarnessRollout) -> None:
    """Let the environment drive the harness. Its own failure is never the agent's."""
    env = opened.taskset.make_env()
    agents = SeatedAgents(opened.taskset.list_seats()[0], SeatedAgent(opened, rollout))
    try:
        await env.setup(agents)
        await env.run(opened.task, agents)
    except AttemptError:
        raise
    except Exception as error:  # boundary: the environment's code
        message = f"environment `{type(env).__name__}`: {type(error).__name__}: {error}"
        raise SandboxFailed(message, kind="environment") from error
    if rollout.failure is not None:
        raise rollout.failure
