"""Runs as typed calls: `run`, `resume`, `regrade` and `replay`. `reading.py` reads their results.

A call that waits has an `async` twin (`arun`, ...). The plain calls also work in a notebook.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import msgspec

from ..agent.loader import find_agent
from ..agent.loader import make_absolute as absolute_agent
from ..core.authoring import Agent, AgentFunction, CriticFunction, Policy, Suite
from ..core.config import RunConfig
from ..core.errors import BadInput
from ..core.records import Verdict
from ..core.summary import RunSummary
from ..ledger.directory import RunDirectory
from ..ledger.images import write_manifest
from ..ledger.reader import LedgerReader
from ..rollout.allocator import keep_bounded
from ..rollout.critic import load_critic
from ..rollout.process_health import allow_files
from ..rollout.sandbox_kinds import find_kind
from ..rollout.worker_protocol import ModelProvider, UpstreamConfig
from ..run.conductor.instance_selection import read_selection, reopen_selection
from ..run.conductor.regrade import RegradeRequest, continue_regrade, find_open_regrade, request_regrade
from ..run.conductor.replay import repeat_suite
from ..run.execute import RunSetup as RunSetup
from ..run.execute import conduct_run, create_run
from ..run.setup.agent_variables import AgentVariables, read_values
from ..run.setup.config import (
    POLICY_URL,
    SCRIPTED,
    add_judge,
    build_config,
    check_requirements,
    default_directory,
    find_upstream,
    make_replay_config,
    read_environment,
)
from ..run.setup.options import ResumeOptions as ResumeOptions
from ..run.setup.options import RunOptions as RunOptions
from ..run.setup.options import parse_settings, replace_settings
from ..run.setup.resumption import check_trust, read_choices
from ..suite.loader import load as load_suite
from ..suite.loader import make_absolute as absolute_suite
from .process import wait
from .start_checks import check_inputs, check_start


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
    return await start(prepare(suite, agent, out, options), observers=observers, policy=policy)


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
    objects = CallerObjects(suite, agent, critic, policy)
    return wait(start(prepare_resume(path, objects, options, accept_changes=accept_changes, trust=trust)))


async def aresume(
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
    """The async twin of `resume`."""
    objects = CallerObjects(suite, agent, critic, policy)
    return await start(prepare_resume(path, objects, options, accept_changes=accept_changes, trust=trust))


def regrade(
    path: str | Path, *, only: Sequence[str] = (), suite: Suite | None = None, trust: bool = False
) -> RunSummary:
    """Grade a run's work again without running the agent; an outcome changes if its grade does."""
    return wait(start(prepare_regrade(path, only, suite, trust=trust)))


async def aregrade(
    path: str | Path, *, only: Sequence[str] = (), suite: Suite | None = None, trust: bool = False
) -> RunSummary:
    """The async twin of `regrade`."""
    return await start(prepare_regrade(path, only, suite, trust=trust))


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
    return wait(start(prepare_replay(path, out, only, CallerObjects(suite, agent, critic), trust=trust)))


async def areplay(
    path: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    agent: Agent | AgentFunction | None = None,
    critic: CriticFunction | None = None,
    trust: bool = False,
) -> RunSummary:
    """The async twin of `replay`."""
    return await start(prepare_replay(path, out, only, CallerObjects(suite, agent, critic), trust=trust))


class CallerObjects(NamedTuple):
    """Objects of the caller, in place of those that the run's configuration names."""

    suite: Suite | None = None
    agent: Agent | AgentFunction | None = None
    critic: CriticFunction | None = None
    policy: Policy | None = None


def prepare(
    suite: Suite | str, agent: Agent | AgentFunction | str | None, out: str | Path | None, options: RunOptions
) -> RunSetup:
    """Check everything that can be checked before a run, and create nothing."""
    found = load_suite(suite) if isinstance(suite, str) else suite
    if not isinstance(found, Suite):
        raise BadInput(
            f"not a suite: an object of type `{type(found).__name__}`",
            "it must be a `holdwater.Suite` or a name",
        )
    chosen = agent if agent is not None else found.defaults.agent
    if chosen is None:
        raise BadInput(
            f"no agent given, and suite `{found.name}` suggests none", "for example `--agent bash`"
        )
    selection = read_selection(options.get("select"))
    settings = parse_settings({**options, "select": selection})
    actor = find_agent(chosen, settings.get("agent_options", {}))
    settings["agent_options"] = dict(actor.options)
    names = (
        absolute_suite(suite) if isinstance(suite, str) else found.name,
        absolute_agent(chosen) if isinstance(chosen, str) else actor.name,
    )
    config = build_config(found, actor, names, settings)
    check_inputs(found, actor, config)
    environment = read_environment(config.base_url)
    check_requirements(found, config, environment)
    critic = options.get("critic")
    return RunSetup(
        path=Path(out) if out is not None else default_directory(found.name),
        config=config,
        suite=found,
        agent=actor,
        environment=environment,
        agent_env=read_values(config.env, options.get("env"), environment.inherited),
        selection=selection,
        importable=isinstance(suite, str) and isinstance(chosen, str),
        critic=critic if critic is not None and not isinstance(critic, str) else None,
    )


def prepare_resume(
    path: str | Path,
    objects: CallerObjects,
    options: ResumeOptions,
    *,
    accept_changes: bool = False,
    trust: bool = False,
) -> RunSetup:
    """Check everything that can be checked before a resume. A regrade that was begun comes first."""
    directory = RunDirectory.open(path)
    before = check_trust(directory, trust=trust)
    config = replace_settings(before, options)
    retry = read_choices(directory, options)
    if config.recipe is not None:
        from ..run.builds.build import make_setup

        build = make_setup(directory.path, config)
        return msgspec.structs.replace(build, resumed=True, retry=retry)

    def prepare_run() -> RunSetup:
        if config.serving is not None:
            again = f"`holdwater serve {config.suite} --agent {config.agent} --out {path}` continues it"
            raise BadInput(f"the directory belongs to a server: `{path}`", again)
        setup = set_up_again(directory.path, config, objects, options.get("env"))
        check_requirements(setup.suite, config, setup.environment)
        selection = reopen_selection(directory, config.select)
        return msgspec.structs.replace(
            setup, resumed=True, retry=retry, accept_changes=accept_changes, selection=selection
        )

    if (begun := find_open_regrade(directory)) is None:
        return prepare_run()
    suite = objects.suite or load_suite(config.suite)
    regrade = _setup_regrade(directory, before, suite, continue_regrade(begun, suite))
    importable = objects.suite is None
    return msgspec.structs.replace(regrade, importable=importable, retry=retry, afterwards=prepare_run)


def prepare_regrade(
    path: str | Path, only: Sequence[str], suite: Suite | None = None, *, trust: bool = False
) -> RunSetup:
    """Check everything that can be checked before a regrade."""
    directory = RunDirectory.open(path)
    config = check_trust(directory, trust=trust)
    found = suite or load_suite(config.suite)
    setup = _setup_regrade(directory, config, found, request_regrade(directory, found, tuple(only)))
    return msgspec.structs.replace(setup, importable=suite is None)


def prepare_replay(
    path: str | Path,
    out: str | Path | None,
    only: Sequence[str],
    objects: CallerObjects = CallerObjects(),  # noqa: B008 - frozen
    *,
    trust: bool = False,
) -> RunSetup:
    """Check everything that can be checked before a replay, and create nothing."""
    source = RunDirectory.open(path)
    config = make_replay_config(check_trust(source, trust=trust), source.path, only)
    setup = set_up_again(Path(), config, objects)
    where = Path(out) if out is not None else default_directory(f"{setup.suite.name}-replay")
    return msgspec.structs.replace(setup, path=where)


def set_up_again(
    path: Path, config: RunConfig, objects: CallerObjects, env: AgentVariables | None = None
) -> RunSetup:
    """Return the setup of a run that has a configuration, with the caller's objects."""
    environment = read_environment(config.base_url)
    load_critic(objects.critic or config.critic)  # raises for an invalid critic before anything starts
    suite = objects.suite or load_suite(config.suite)
    return RunSetup(
        path=path,
        config=config,
        suite=repeat_suite(suite, config),
        agent=find_agent(objects.agent or config.agent, config.agent_options),
        environment=environment,
        agent_env=read_values(config.env, env, environment.inherited),
        importable=objects.suite is None and objects.agent is None,
        critic=objects.critic,
        policy=objects.policy,
    )


def _setup_regrade(
    directory: RunDirectory, config: RunConfig, suite: Suite, request: RegradeRequest
) -> RunSetup:
    return RunSetup(
        path=directory.path,
        config=config,
        suite=suite,
        agent=Agent(name="none", act=lambda instance: None),  # no agent acts
        environment=read_environment(),
        regrade=request,
        resumed=True,
    )


async def start(setup: RunSetup, **hooks: Any) -> RunSummary:
    """Conduct a run to its end, in a new directory or in its own. `hooks` replace fields of the setup."""
    setup = msgspec.structs.replace(setup, **hooks)
    config, runs_agents = setup.config, setup.build_run is None and setup.regrade is None
    if serves := setup.open_server is not None:
        allow_files()
        keep_bounded()
    elif runs_agents and not setup.resumed:
        await check_start(setup)
    check = find_kind(config.sandbox).check_start
    if check is not None and runs_agents and (serves or not setup.resumed):
        await check(config)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(_open_upstream(setup)) if runs_agents else None
        directory = (
            RunDirectory.open(setup.path)
            if setup.resumed
            else create_run(setup.path, config, setup.selection)
        )
        if serves:
            directory.make_private()
        setup.begun(directory)
        local = setup.policy is not None or setup.critic is not None
        ready = msgspec.structs.replace(setup, upstream=upstream, importable=setup.importable and not local)
        summary = await conduct_run(directory, ready)
    if setup.build_run is not None:
        with LedgerReader(directory) as reader:
            write_manifest(reader)
    over = config.serving is not None or (summary.state == "finished" and not setup.retry)
    if setup.afterwards is None or over or find_open_regrade(directory) is not None:
        return summary
    names = ("observers", "say", "signals", "periodic_tasks", "enclose")  # `begun` has been called
    return await start(setup.afterwards(), **{name: getattr(setup, name) for name in names})


@asynccontextmanager
async def _open_upstream(setup: RunSetup) -> AsyncIterator[UpstreamConfig | None]:
    """Yield the upstream for the run's model calls; the scripted model is served from here."""
    config = setup.config
    if setup.policy is not None:
        yield add_judge(None, config, setup.environment)
        return
    if config.model != SCRIPTED or config.replays is not None:
        yield add_judge(find_upstream(config, setup.environment), config, setup.environment)
        return
    from ..suite.demo.script import reply
    from ..testing.scripted_model import serve_script

    async with serve_script(reply) as url:
        upstream = UpstreamConfig(everywhere=(ModelProvider(url=url),))
        yield add_judge(upstream, config, setup.environment)
