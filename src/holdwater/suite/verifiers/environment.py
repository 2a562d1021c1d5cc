"""Environments of verifiers 0.1 as suites: their rollout is the agent, and their rubric grades.

An environment plays its own turns and tools in the worker, with the model behind the gateway. `lister.py`
lists its rows. Tasksets of newer versions are in `scoring.py`.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...core.authoring import Agent, GradedAttempt, GradingSandbox, GroupMember, Model
from ...core.errors import AgentFailed, BadInput, GradeFailed
from ...core.records import Grade, Instance
from ...plugin import call_guarded, find_module
from .tasks import TaskDescription, TasksetSpec, parse_spec, read_task

FIRST_TASKSETS = (0, 2)  # the version from which the package has tasksets
MOST_OPEN = 4096  # attempts between their rollout and their grade, in one process
ROW = "row"  # the key in a task's data
# Environments that open sandboxes of a cloud.
CLOUD = frozenset(("SandboxEnv", "CliAgentEnv", "HarborEnv", "BrowserEnv", "PythonEnv"))

# By the directory of an attempt's artifacts; bound: MOST_OPEN.
_open_states: OrderedDict[Path, Any] = OrderedDict()
_threads = ThreadPoolExecutor(1, thread_name_prefix="holdwater-verifiers")


def is_older_version() -> bool:
    """Return whether the installed package has environments instead of tasksets."""
    from importlib import metadata  # a slow import, for which few runs have a use

    try:
        major, minor = metadata.version("verifiers").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return (int(major), int(minor)) < FIRST_TASKSETS


@cache
def load_environment(spec: str) -> Any:
    """Load the environment of a spec once in this process. It takes seconds: call it in a thread."""
    parsed = parse_spec(spec)
    vf: Any = import_module("verifiers")
    _keep_signals()
    if parsed.path is None:
        return call_guarded(
            lambda: vf.load_environment(parsed.name, **parsed.options), f"environment `{parsed.name}`"
        )
    module = find_module(str(parsed.path))
    if not hasattr(module, "load_environment"):
        raise BadInput(f"`{parsed.name}` has no `load_environment`")
    return call_guarded(lambda: module.load_environment(**parsed.options), f"environment `{parsed.name}`")


def _keep_signals() -> None:
    """Keep environments from handling SIGINT and SIGTERM: the run itself drains on them."""
    module: Any = import_module("verifiers.envs.environment")
    module.signal = SimpleNamespace(
        SIGINT=signal.SIGINT,
        SIGTERM=signal.SIGTERM,
        default_int_handler=signal.default_int_handler,
        signal=lambda number, handler: None,
    )


def check_environment(env: Any, spec: TasksetSpec) -> None:
    """Raise BadInput if the environment cannot run here, or if its group rewards are not asked for."""
    if cloud := CLOUD.intersection(cls.__name__ for cls in type(env).__mro__):
        raise BadInput(f"environment `{type(env).__name__}` opens sandboxes of its own: `{min(cloud)}`")
    if env.requires_group_rollouts and not spec.env:
        raise BadInput(
            f"environment `{type(env).__name__}` has group rewards",
            f"`vf:{spec.name}?env={spec.name}` scores the samples of a row together: `--samples 4`",
        )


def describe_rows(env: Any, spec: str) -> Iterator[TaskDescription]:
    """Yield the rows of the environment's evaluation dataset."""
    for index, row in enumerate(env.get_eval_dataset()):
        data = {"idx": index, "prompt": _plain_prompt(row.get("prompt")), ROW: dict(row)}
        yield TaskDescription(data=data, type=type(env).__name__, source=spec)


def _plain_prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) or not prompt else [dict(message) for message in prompt]


async def _load(spec: str) -> Any:
    return await asyncio.get_running_loop().run_in_executor(_threads, load_environment, spec)


class EnvironmentScorer:
    """The rubric of one environment, as functions of a suite."""

    def __init__(self, spec: TasksetSpec) -> None:
        self._passing = spec.passing

    async def grade(
        self, instance: Instance, sandbox: GradingSandbox, answer: Any, *, attempt: GradedAttempt
    ) -> Grade:
        """Score the rollout; with group rewards, its group decides."""
        env = await _load(read_task(instance).source)
        state = _open_states.get(sandbox.artifacts)
        if state is None:
            raise GradeFailed("the environment's rollout has not run in this process", kind="lost")
        if env.requires_group_rollouts and attempt.grouped:
            return Grade(passed=False, score=0.0, detail="its group decides")
        if env.requires_group_rollouts:
            await env.rubric.score_group([state])
        else:
            await env.rubric.score_rollout(state)
        await self._close(env, sandbox)
        return self._make_grade(state)

    async def score_group(self, instance: Instance, members: Sequence[GroupMember]) -> list[Grade]:
        """Score the rollouts of a row together."""
        env = await _load(read_task(instance).source)
        states = [_open_states[member.sandbox.artifacts] for member in members]
        await env.rubric.score_group(states)
        for member in members:
            await self._close(env, member.sandbox)
        return [self._make_grade(state) for state in states]

    async def _close(self, env: Any, sandbox: GradingSandbox) -> None:
        await env.rubric.cleanup(_open_states.pop(sandbox.artifacts))

    def _make_grade(self, state: Mapping[str, Any]) -> Grade:
        score, metrics = float(state["reward"]), dict(state["metrics"] or {})
        return Grade(
            passed=score >= self._passing,
            score=score,
            detail="\n".join(f"{name}: {value:g}" for name, value in metrics.items()),
            metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)},
        )


async def play(instance: Instance, sandbox: GradingSandbox, model: Model) -> str | None:
    """Let the environment play the row; return the model's last text."""
    from openai import AsyncOpenAI
    from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient

    described = read_task(instance)
    env = await _load(described.source)
    async with AsyncOpenAI(base_url=model.url, api_key=model.key, max_retries=0) as client:
        state = await env.rollout(described.data[ROW], OpenAIChatCompletionsClient(client), model.name, {})
    if state.get("error") is not None:
        raise AgentFailed(f"{type(state['error']).__name__}: {state['error']}", kind="environment")
    _open_states[sandbox.artifacts] = state
    while len(_open_states) > MOST_OPEN:
        _open_states.popitem(last=False)
    last = (state["completion"] or [None])[-1]
    content = getattr(last, "content", None) if not isinstance(last, dict) else last.get("content")
    return content if isinstance(content, str) else None


AGENT = Agent(name="vf-environment", act=play, needs_model=True, description="the environment itself")
