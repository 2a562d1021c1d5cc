"""Harnesses of verifiers as agents: `own` is the one that a taskset's package brings, or else `bash`.

A harness runs in the attempt's sandbox and calls the model through the gateway, as any agent does. The suite
suggests `own`; `--agent holdwater.suite.verifiers.harness:null` names another one. Tool servers of a task are
started beside the program (`tool_servers.py`).
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...core.authoring import Agent, AgentFunction, AttemptHandle, GradingSandbox, Model
from ...core.errors import AgentFailed, AttemptError, RunFailed, SandboxFailed
from ...core.records import Instance
from ...core.serving_protocol import TrajectoryReference
from .scoring import EPISODE_FILE, STATE, OpenTask, find_open_task, refresh_trace, write_trace
from .tasks import TASK, read_task

OWN = "own"
NAME_PREFIX = "vf-"
STATE_FILE = ".vf-state.json"


def make_agent(harness: str) -> Agent:
    """Return the agent that runs a harness; `own`: the one of the task's taskset."""

    async def act(instance: Instance, sandbox: GradingSandbox, model: Model, attempt: AttemptHandle) -> Any:
        if TASK not in instance.data:
            raise AgentFailed("a harness of verifiers needs a task of `vf:`", kind="task", again=False)
        named = read_task(instance).harness if harness == OWN else harness
        return await play_task(instance, sandbox, model, named, attempt.reference)

    return Agent(
        name=f"{NAME_PREFIX}{harness}", act=act, needs_model=True, description="a harness of verifiers"
    )


async def play_task(
    instance: Instance,
    sandbox: GradingSandbox,
    model: Model,
    harness: str,
    reference: TrajectoryReference,
) -> Any:
    """Run a harness on a task until its program ends; return the state that tool servers left."""
    from .runtime import SandboxRuntime

    opened = find_open_task(sandbox)
    vf, trace = opened.taskset.vf, opened.trace
    try:
        program = vf.load_harness(vf.harness_config_type(harness)(id=harness))
    except ModuleNotFoundError as error:
        raise RunFailed(str(error), kind="harness") from None
    env = opened.task.runtime_env()
    runtime = SandboxRuntime(sandbox, trace.id, env, instance.start.user, as_agent=True)
    urls = await _prepare_servers(opened, sandbox, runtime)
    context = vf.ModelContext(model=model.name, client=vf.EvalClientConfig(base_url=model.url))
    try:
        await program.setup(runtime)
        session = await program.session(
            context, trace, runtime, model.sandbox_url, model.key, urls, opened.task.data
        )
        if opened.taskset.drives_turns:
            from .episode import HarnessRollout, play_episode

            refresh = partial(refresh_trace, trace, reference)
            try:
                await play_episode(opened, HarnessRollout(opened, session, refresh))
            finally:
                write_trace(trace, sandbox, EPISODE_FILE)
        else:
            await session.turn()
    except vf.RolloutError as error:
        cause: Any = error.__cause__
        if isinstance(cause, AttemptError):
            raise cause from None
        raise AgentFailed(f"{type(error).__name__}: {error}", kind="harness") from error
    return await _take_state(sandbox) if urls else None


async def _prepare_servers(opened: OpenTask, sandbox: GradingSandbox, runtime: Any) -> dict[str, str]:
    """Let the runtime start the tool servers before the program; return their URLs, filled in then."""
    shared, own = opened.taskset.find_toolsets(opened.task)
    if not shared and not own:
        return {}
    if (await runtime.run(["test", "-x", sys.executable], {})).exit_code:
        raise SandboxFailed(
            "tool servers need the interpreter that runs holdwater, which the sandbox does not show",
            "use `--sandbox process`",
            kind="tools",
            again=False,
        )
    sources = f"{sandbox.private}/vf-sources"
    servers, urls = [], {}
    for number, server in enumerate((*shared, *own)):
        await _copy_source(type(server), sandbox, sources)
        placeholder = f"vf-tool-{number}-{secrets.token_hex(8)}"
        urls[server.server_name] = f"http://{placeholder}/mcp"
        servers.append(
            {
                "name": server.server_name,
                "module": type(server).__module__,
                "config": server.config.model_dump_json(),
                "own": number >= len(shared),
                "placeholder": placeholder,
            }
        )
    data = opened.task.data
    await _copy_source(type(data), sandbox, sources)
    settings = {
        "secret": secrets.token_urlsafe(16),
        "sources": sources,
        "servers": servers,
        "state": opened.trace.state.model_dump_json(),
        "task": {"cls": f"{type(data).__module__}:{type(data).__qualname__}", "task": data.model_dump_json()},
    }
    await sandbox.write(f"{sandbox.private}/vf-tools.json", msgspec.json.encode(settings))
    script = f"{sandbox.private}/vf-tools.py"
    await sandbox.write(script, Path(__file__).with_name("tool_servers.py").read_bytes())
    runtime.launcher = (sys.executable, script, f"{sandbox.private}/vf-tools.json", STATE_FILE, "--")
    return urls


async def _copy_source(cls: type, sandbox: GradingSandbox, sources: str) -> None:
    """Copy the package or the file that defines a class: the taskset's own files are hidden."""
    name = cls.__module__.partition(".")[0]
    if name == "verifiers":
        return
    module = sys.modules[name]
    places: Sequence[str] = getattr(module, "__path__", ())
    for place in places:
        await sandbox.put(Path(place), f"{sources}/{name}")
    if not places and module.__file__ is not None:
        await sandbox.write(f"{sources}/{name}.py", Path(module.__file__).read_bytes())


async def _take_state(sandbox: GradingSandbox) -> dict[str, Any] | None:
    """Return the state of the tool servers, and remove its file: it is no work."""
    try:
        state = msgspec.json.decode(await sandbox.read(STATE_FILE))
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    await sandbox.run(["rm", "-f", STATE_FILE])
    return {STATE: state}


def __getattr__(name: str) -> Agent | AgentFunction:
    """Return the agent of a harness by its name, such as `null` or `codex`."""
    if name.startswith("_"):
        raise AttributeError(name)
    return make_agent(name)
