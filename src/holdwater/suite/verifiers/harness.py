"""Harnesses of verifiers as agents: `own` is the one that a taskset's package brings, or else `bash`.

A harness runs in the attempt's sandbox and calls the model through the gateway, as any agent does. The suite
suggests `own`; `--agent holdwater.suite.verifiers.harness:null` names another one.
"""

from __future__ import annotations

from typing import Any

from ...core.authoring import Agent, AgentFunction, Model, Sandbox
from ...core.errors import AgentFailed, AttemptError, BadInput
from ...core.records import Instance
from .tasks import TASK, read_task

OWN = "own"


def make_agent(harness: str) -> Agent:
    """Return the agent that runs a harness; `own`: the one of the task's taskset."""

    async def act(instance: Instance, sandbox: Sandbox, model: Model) -> None:
        if TASK not in instance.data:
            raise AgentFailed("a harness of verifiers needs a task of `vf:`", kind="task", again=False)
        await play_task(instance, sandbox, model, read_task(instance).harness if harness == OWN else harness)

    return Agent(name=f"vf-{harness}", act=act, needs_model=True, description="a harness of verifiers")


async def play_task(instance: Instance, sandbox: Sandbox, model: Model, harness: str) -> None:
    """Run a harness on a task until its program ends."""
    from .package import import_verifiers
    from .runtime import SandboxRuntime
    from .scoring import make_trace

    vf = import_verifiers()
    try:
        program = vf.load_harness(vf.harness_config_type(harness)(id=harness))
    except ModuleNotFoundError as error:
        raise BadInput(str(error)) from None
    task = vf.Task(vf.WireTaskData.model_validate(read_task(instance).data))
    trace = make_trace(vf, task)
    runtime = SandboxRuntime(sandbox, trace.id, {}, instance.start.user, as_agent=True)
    context = vf.ModelContext(model=model.name, client=vf.EvalClientConfig(base_url=model.url))
    try:
        await program.setup(runtime)
        session = await program.session(context, trace, runtime, model.sandbox_url, model.key, {}, task.data)
        await session.turn()
    except vf.RolloutError as error:
        cause: Any = error.__cause__
        if isinstance(cause, AttemptError):
            raise cause from None
        raise AgentFailed(f"{type(error).__name__}: {error}", kind="harness") from error


def __getattr__(name: str) -> Agent | AgentFunction:
    """Return the agent of a harness by its name, such as `null` or `codex`."""
    if name.startswith("_"):
        raise AttributeError(name)
    return make_agent(name)
