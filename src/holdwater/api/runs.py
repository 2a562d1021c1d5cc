"""Runs as typed calls: `run`, `resume`, `regrade` and `replay`. `reading.py` reads their results.

A call that waits has an `async` twin (`arun`, ...). The plain calls also work in a notebook.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

import msgspec

from ..agent.loader import load as load_agent
from ..agent.loader import make_absolute as absolute_agent
from ..agent.loader import python as python_agent
from ..core.authoring import Agent, AgentFunction, CriticFunction, Suite
from ..core.config import RunConfig
from ..core.errors import AGENT_MISSING, BadInput, RunFailed
from ..core.records import Verdict
from ..core.summary import RunSummary
from ..gateway.upstreams.policy import Policy
from ..ledger.directory import RunDirectory
from ..rollout.critic import load_critic
from ..rollout.sandbox_kinds import find_kind
from ..rollout.worker_protocol import ModelProvider, UpstreamConfig
from ..run.conductor.instance_source import InstanceSource, first_instances
from ..run.conductor.regrade import RegradeRequest, continue_regrade, find_open_regrade, request_regrade
from ..run.conductor.replay import replay_suite
from ..run.execute import create_run
from ..run.setup.config import (
    POLICY_URL,
    SCRIPTED,
    build_config,
    check_variables,
    default_directory,
    find_upstream,
    make_replay_config,
    read_environment,
)
from ..run.setup.options import ResumeOptions as ResumeOptions
from ..run.setup.options import RunOptions as RunOptions
from ..run.setup.options import parse_settings, replace_settings
from ..run.setup.resumption import read_choices
from ..run.setup.trust import check_trust
from ..suite.loader import load as load_suite
from ..suite.loader import make_absolute as absolute_suite
from .run_hooks import RunHooks as RunHooks
from .run_hooks import complete as complete
from .run_hooks import conduct_with_hooks, make_setup, wait

MOST_EXAMPLES = 3  # maximum number of instances that an error names as examples


class PreparedRun(msgspec.Struct, frozen=True):
    """A run that is ready to start: everything is checked, nothing is created yet."""

    path: Path
    config: RunConfig
    suite: Suite
    agent: Agent
    importable: bool
    critic: CriticFunction | None = None  # a function that workers cannot import by name


def run(
    suite: Suite | str,
    agent: Agent | AgentFunction | str | None = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[Callable[[Verdict], None]] = (),
    policy: Policy | None = None,
    **options: Unpack[RunOptions],
) -> RunSummary:
    """Run a suite with an agent to its end; return the run's summary, which lists failures: none is raised.

    `policy` answers the model calls: it receives each request and returns the reply.
    """
    return wait(arun(suite, agent, out=out, observers=observers, policy=policy, **options))


async def arun(
    suite: Suite | str,
    agent: Agent | AgentFunction | str | None = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[Callable[[Verdict], None]] = (),
    policy: Policy | None = None,
    **options: Unpack[RunOptions],
) -> RunSummary:
    """The async twin of `run`."""
    if policy is not None:
        options["model"] = options.get("model") or "policy"
        options["base_url"] = POLICY_URL
    return await start(prepare(suite, agent, out, options), {"observers": observers, "policy": policy})


def resume(
    path: str | Path,
    *,
    suite: Suite | None = None,
    agent: Agent | AgentFunction | None = None,
    critic: CriticFunction | None = None,
    accept_changes: bool = False,
    policy: Policy | None = None,
    trust: bool = False,
    **options: Unpack[ResumeOptions],
) -> RunSummary:
    """Resume a run that was stopped or killed. Pass the same objects again that the run was started with.

    `retry` reopens samples that did not pass; the other options replace settings of the run. `trust` imports
    the code that a run of another user names.
    """
    around: RunHooks = {"policy": policy, "critic": critic}
    return wait(
        aresume(
            path,
            suite=suite,
            agent=agent,
            accept_changes=accept_changes,
            around=around,
            trust=trust,
            **options,
        )
    )


async def aresume(
    path: str | Path,
    *,
    suite: Suite | None = None,
    agent: Agent | AgentFunction | None = None,
    accept_changes: bool = False,
    around: RunHooks | None = None,
    trust: bool = False,
    **options: Unpack[ResumeOptions],
) -> RunSummary:
    """The async twin of `resume`."""
    directory = RunDirectory.open(path)
    config = replace_settings(check_trust(directory, trust=trust), options)
    retry = read_choices(directory, options)
    if config.recipe is not None:
        from .images import resume_build

        return await resume_build(directory, config, retry, around or {})
    if (begun := find_open_regrade(directory)) is not None:
        grading = suite or load_suite(config.suite)
        asked = continue_regrade(begun, grading)
        summary = await _regrade(directory, grading, asked, importable=suite is None, around=around or {})
        done = config.serving is not None or (summary.state == "finished" and not retry)
        if done or find_open_regrade(directory) is not None:
            return summary
        around = around or {}
        around.pop("begun", None)  # the display is already running
    if config.serving is not None:
        again = f"`holdwater serve {config.suite} --agent {config.agent} --out {path}` continues it"
        raise BadInput(f"the directory belongs to a server: `{path}`", again)
    found = suite or load_suite(config.suite)
    if config.replays is not None:
        found = replay_suite(found, Path(config.replays))
    given = make_setup(found, _as_agent(agent or config.agent), around or {})
    load_critic(given.critic or config.critic)  # raises for an invalid critic before anything starts
    check_variables(found, config, read_environment())
    importable = suite is None and agent is None and given.critic is None
    given = msgspec.structs.replace(
        given,
        resumed=True,
        accept_changes=accept_changes,
        importable=importable and given.policy is None,
        retry=retry,
        config=config,
    )
    async with _open_upstream(config, given.policy) as upstream:
        return await conduct_with_hooks(
            directory, msgspec.structs.replace(given, upstream=upstream), around or {}
        )


def regrade(
    path: str | Path, *, only: Sequence[str] = (), suite: Suite | None = None, trust: bool = False
) -> RunSummary:
    """Grade a run's work again without running the agent; an outcome changes if its grade does."""
    return wait(aregrade(path, only=only, suite=suite, trust=trust))


async def aregrade(
    path: str | Path,
    *,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    around: RunHooks | None = None,
    trust: bool = False,
) -> RunSummary:
    """The async twin of `regrade`."""
    directory = RunDirectory.open(path)
    found = suite or load_suite(check_trust(directory, trust=trust).suite)
    asked = request_regrade(directory, found, tuple(only))
    return await _regrade(directory, found, asked, importable=suite is None, around=around or {})


async def _regrade(
    directory: RunDirectory, suite: Suite, asked: RegradeRequest, *, importable: bool, around: RunHooks
) -> RunSummary:
    """Conduct a regrade; no agent acts."""
    given = make_setup(suite, Agent(name="none", act=lambda instance: None), around)
    given = msgspec.structs.replace(given, resumed=True, regrade=asked, importable=importable)
    return await conduct_with_hooks(directory, given, around)


def replay(
    path: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    agent: Agent | AgentFunction | None = None,
    critic: CriticFunction | None = None,
    trust: bool = False,
) -> RunSummary:
    """Run the attempts of a run again, with its recorded replies instead of a model."""
    around: RunHooks = {"critic": critic}
    return wait(areplay(path, out=out, only=only, suite=suite, agent=agent, around=around, trust=trust))


async def areplay(
    path: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    agent: Agent | AgentFunction | None = None,
    around: RunHooks | None = None,
    trust: bool = False,
) -> RunSummary:
    """The async twin of `replay`."""
    source = RunDirectory.open(path)
    config = make_replay_config(check_trust(source, trust=trust), source.path, only)
    actor = _as_agent(agent or config.agent)
    again = replay_suite(suite or load_suite(config.suite), source.path)
    where = Path(out) if out is not None else default_directory(f"{again.name}-replay")
    critic = (around or {}).get("critic")
    load_critic(critic or config.critic)
    importable = suite is None and agent is None and critic is None
    prepared = PreparedRun(where, config, again, actor, importable, critic)
    return await start(prepared, around or {})


def prepare(
    suite: Suite | str, agent: Agent | AgentFunction | str | None, out: str | Path | None, options: RunOptions
) -> PreparedRun:
    """Check everything that can be checked before a run, and create nothing."""
    found = load_suite(suite) if isinstance(suite, str) else suite
    chosen = agent if agent is not None else found.defaults.agent
    if chosen is None:
        raise BadInput(
            f"no agent given, and suite `{found.name}` suggests none", "for example `--agent bash`"
        )
    actor = _as_agent(chosen)
    names = (
        absolute_suite(suite) if isinstance(suite, str) else found.name,
        absolute_agent(chosen) if isinstance(chosen, str) else actor.name,
    )
    importable = isinstance(suite, str) and isinstance(chosen, str)
    config = build_config(found, actor, names, parse_settings(options))
    _check_inputs(found, actor, config)
    check_variables(found, config, read_environment())
    path = Path(out) if out is not None else default_directory(found.name)
    critic = options.get("critic")
    own = critic if critic is not None and not isinstance(critic, str) else None
    return PreparedRun(path, config, found, actor, importable and own is None, own)


async def start(prepared: PreparedRun, around: RunHooks) -> RunSummary:
    """Create the run directory of a prepared run and conduct the run."""
    await check_start(prepared)
    policy = around.get("policy")
    if (check := find_kind(prepared.config.sandbox).check_start) is not None:
        await check()
    async with _open_upstream(prepared.config, policy) as upstream:
        directory = create_run(prepared.path, prepared.config)
        given = make_setup(prepared.suite, prepared.agent, around)
        importable = prepared.importable and policy is None
        given = msgspec.structs.replace(
            given, importable=importable, upstream=upstream, critic=prepared.critic or given.critic
        )
        return await conduct_with_hooks(directory, given, around)


def _check_inputs(suite: Suite, agent: Agent, config: RunConfig) -> None:
    """Run the checks of suite and agent; a missing program may still be in containers or mounts."""
    kind = find_kind(config.sandbox)
    if suite.check is not None:
        suite.check()
    try:
        if agent.check is not None:
            agent.check()
    except RunFailed as error:
        if error.kind != AGENT_MISSING or (kind.shows_machine and not config.mounts):
            raise BadInput(error.message, error.hint) from None  # nothing has been created yet
    kind.check(config, agent)


async def check_start(prepared: PreparedRun) -> None:
    """Raise BadInput if no instance could run: none is selected, or the agent needs a model and has none."""
    config, suite = prepared.config, prepared.suite
    if config.model is None and config.replays is None and prepared.agent.needs_model:
        name = prepared.agent.name.rpartition("/")[2]  # without the directory of its file
        raise BadInput(f"agent `{name}` calls the model, and the run has none", "give one with `--model`")
    if suite.size == 0:
        raise BadInput(f"suite `{suite.name}` has no instances")
    if config.only and not await first_instances(suite, config, 1):
        patterns = ", ".join(f"`{pattern}`" for pattern in config.only)
        there = await first_instances(suite, msgspec.structs.replace(config, only=()), MOST_EXAMPLES)
        raise BadInput(
            f"no instance of suite `{suite.name}` matches `--only`: {patterns}",
            f"it has, for example, {', '.join(f'`{name}`' for name in there)}" if there else "",
        )


async def preview(prepared: PreparedRun, count: int) -> tuple[list[str], int | None]:
    """Return the ids of the first instances that the run would try, and their total, if it is known."""
    await check_start(prepared)
    source = InstanceSource(prepared.suite, prepared.config)
    first: list[str] = []
    try:
        while len(first) < count and (items := await source.take(count - len(first))):
            first += [instance.id for instance, _ in items]
        return first, source.total
    finally:
        source.close()
        if source.error is not None:
            raise source.error


def _as_agent(agent: Agent | AgentFunction | str) -> Agent:
    if isinstance(agent, str):
        return load_agent(agent)
    return agent if isinstance(agent, Agent) else python_agent(agent)


@asynccontextmanager
async def _open_upstream(
    config: RunConfig, policy: Policy | None = None
) -> AsyncIterator[UpstreamConfig | None]:
    """Yield the upstream for the run's model calls; the scripted model is served from here."""
    if policy is not None:
        yield None
        return
    if config.model != SCRIPTED or config.replays is not None:
        yield find_upstream(config, read_environment())
        return
    from ..suite.demo.script import reply
    from ..testing.scripted_model import serve_script

    async with serve_script(reply) as url:
        yield UpstreamConfig(everywhere=ModelProvider(url=url))
