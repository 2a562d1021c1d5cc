"""All that the command does, as typed calls: `run`, `resume`, `regrade`, `show`, `transcript`, `export`...

Each has an `async` twin where it waits (`arun`, ...). In a notebook the plain calls work too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO, Unpack

import msgspec

from ..agent.load import absolute as absolute_agent
from ..agent.load import load as load_agent
from ..agent.python import python as python_agent
from ..core.authoring import Act, Agent, Critique, Suite
from ..core.config import RunConfig, SandboxKind
from ..core.errors import AGENT_MISSING, BadInput, RunFailed
from ..core.records import Verdict
from ..core.summary import Summary
from ..gateway.upstreams.policy import Policy
from ..ledger.audit import Audit
from ..ledger.audit import audit as audit_run
from ..ledger.directory import RunDirectory
from ..ledger.export import export as export_run
from ..ledger.reader import Reader
from ..ledger.trajectory import Turn, conversation_of, find_attempt, turns
from ..rollout.critic import own_critic
from ..rollout.wire import Provider, Upstream
from ..run.config import (
    POLICY,
    SCRIPTED,
    build,
    check_variables,
    default_directory,
    environment,
    replaying,
    upstream_of,
)
from ..run.dock import check_daemon
from ..run.execute import create
from ..run.options import Options as Options
from ..run.options import ResumeOptions as ResumeOptions
from ..run.options import replace_settings, settings
from ..run.regrade import RegradeRequest, ask_regrade, continue_regrade, open_regrade
from ..run.replay import replayed
from ..run.resumption import read_choices
from ..run.source import first_instances
from ..run.trust import check_trust
from ..sandbox.probe import probe
from ..sandbox.visibility import check_directories, check_mounts
from ..suite.load import absolute as absolute_suite
from ..suite.load import load as load_suite
from .around import Around as Around
from .around import complete as complete
from .around import conducted, given_to, wait

NAMED = 3  # instances that an error gives as examples


class Prepared(msgspec.Struct, frozen=True):
    """A run that could be started: everything has been checked, nothing has been made."""

    path: Path
    config: RunConfig
    suite: Suite
    agent: Agent
    importable: bool
    critic: Critique | None = None  # a function that workers do not find by its name


def run(
    suite: Suite | str,
    agent: Agent | Act | str | None = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[Callable[[Verdict], None]] = (),
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Summary:
    """Run a suite with an agent to its end; the run's summary. What went wrong is in it, not raised.

    `policy` answers the model calls: it is given each request and returns the reply.
    """
    return wait(arun(suite, agent, out=out, observers=observers, policy=policy, **options))


async def arun(
    suite: Suite | str,
    agent: Agent | Act | str | None = None,
    *,
    out: str | Path | None = None,
    observers: Sequence[Callable[[Verdict], None]] = (),
    policy: Policy | None = None,
    **options: Unpack[Options],
) -> Summary:
    """`run`, for code that has an event loop."""
    if policy is not None:
        options["model"] = options.get("model") or "policy"
        options["base_url"] = POLICY
    return await start(prepare(suite, agent, out, options), {"observers": observers, "policy": policy})


def resume(
    path: str | Path,
    *,
    suite: Suite | None = None,
    agent: Agent | Act | None = None,
    critic: Critique | None = None,
    accept_changes: bool = False,
    policy: Policy | None = None,
    trust: bool = False,
    **options: Unpack[ResumeOptions],
) -> Summary:
    """Go on with a run that was stopped or killed. Objects that the run was given are given again.

    `retry` opens samples again that did not pass; the other options replace settings of the run. `trust`
    imports the code that another user's run names.
    """
    around: Around = {"policy": policy, "critic": critic}
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
    agent: Agent | Act | None = None,
    accept_changes: bool = False,
    around: Around | None = None,
    trust: bool = False,
    **options: Unpack[ResumeOptions],
) -> Summary:
    """`resume`, for code that has an event loop."""
    directory = RunDirectory.open(path)
    config = replace_settings(check_trust(directory, trust=trust), options)
    retry = read_choices(directory, options)
    if config.recipe is not None:
        from .images import go_on

        return await go_on(directory, config, retry, around or {})
    if (begun := open_regrade(directory)) is not None:
        grading = suite or load_suite(config.suite)
        asked = continue_regrade(begun, grading)
        summary = await _regrade(directory, grading, asked, importable=suite is None, around=around or {})
        done = config.serving is not None or (summary.state == "finished" and not retry)
        if done or open_regrade(directory) is not None:
            return summary
        around = around or {}
        around.pop("begun", None)  # its display goes on
    if config.serving is not None:
        again = f"`holdwater serve {config.suite} --agent {config.agent} --out {path}` goes on with it"
        raise BadInput(f"the directory is a server's: `{path}`", again)
    found = suite or load_suite(config.suite)
    if config.replays is not None:
        found = replayed(found, Path(config.replays))
    given = given_to(found, _agent(agent or config.agent), around or {})
    own_critic(given.critic or config.critic)  # refuses what is none before anything is started
    check_variables(found, config, environment())
    importable = suite is None and agent is None and given.critic is None
    given = msgspec.structs.replace(
        given,
        resumed=True,
        accept_changes=accept_changes,
        importable=importable and given.policy is None,
        retry=retry,
        config=config,
    )
    async with _upstream(config, given.policy) as upstream:
        return await conducted(directory, msgspec.structs.replace(given, upstream=upstream), around or {})


def regrade(
    path: str | Path, *, only: Sequence[str] = (), suite: Suite | None = None, trust: bool = False
) -> Summary:
    """Grade a run's work again without running the agent; outcomes change where the grade does."""
    return wait(aregrade(path, only=only, suite=suite, trust=trust))


async def aregrade(
    path: str | Path,
    *,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    around: Around | None = None,
    trust: bool = False,
) -> Summary:
    """`regrade`, for code that has an event loop."""
    directory = RunDirectory.open(path)
    found = suite or load_suite(check_trust(directory, trust=trust).suite)
    asked = ask_regrade(directory, found, tuple(only))
    return await _regrade(directory, found, asked, importable=suite is None, around=around or {})


async def _regrade(
    directory: RunDirectory, suite: Suite, asked: RegradeRequest, *, importable: bool, around: Around
) -> Summary:
    """Conduct a regrade: no agent acts."""
    given = given_to(suite, Agent(name="none", act=lambda instance: None), around)
    given = msgspec.structs.replace(given, resumed=True, regrade=asked, importable=importable)
    return await conducted(directory, given, around)


def replay(
    path: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    agent: Agent | Act | None = None,
    critic: Critique | None = None,
    trust: bool = False,
) -> Summary:
    """Run what was tried in a run again, with its recorded replies in the place of a model."""
    around: Around = {"critic": critic}
    return wait(areplay(path, out=out, only=only, suite=suite, agent=agent, around=around, trust=trust))


async def areplay(
    path: str | Path,
    *,
    out: str | Path | None = None,
    only: Sequence[str] = (),
    suite: Suite | None = None,
    agent: Agent | Act | None = None,
    around: Around | None = None,
    trust: bool = False,
) -> Summary:
    """`replay`, for code that has an event loop."""
    source = RunDirectory.open(path)
    config = replaying(check_trust(source, trust=trust), source.path, only)
    actor = _agent(agent or config.agent)
    again = replayed(suite or load_suite(config.suite), source.path)
    where = Path(out) if out is not None else default_directory(f"{again.name}-replay")
    critic = (around or {}).get("critic")
    own_critic(critic or config.critic)
    importable = suite is None and agent is None and critic is None
    prepared = Prepared(where, config, again, actor, importable, critic)
    return await start(prepared, around or {})


def show(path: str | Path) -> Summary:
    """A run in a page."""
    with Reader(path) as reader:
        return reader.summary()


def audit(path: str | Path) -> Audit:
    """Prove that nothing is missing: planned = settled, one verdict an attempt, every segment intact."""
    return audit_run(path)


def export(
    path: str | Path,
    out: BinaryIO | str | Path,
    *,
    what: str | None = None,
    format: str = "jsonl",
    everything: bool = False,
) -> str:
    """Stream a run, or a part of it, to `out`: a file, or a directory where the format is one.

    Directories are `atif`, `openhands`, `harbor`, and `swebench` to a path. What is left out, in words.
    """
    return export_run(path, what, format, Path(out) if isinstance(out, str) else out, everything=everything)


def transcript(
    path: str | Path, instance: str, *, sample: int = 0, attempt: int | None = None
) -> Iterator[Turn]:
    """The turns of an attempt, one in memory at a time: the trajectory, then what went on beside it."""
    with Reader(path) as reader:
        found = reader.find(instance)
        if found is None:
            raise BadInput(f"no such instance in the run: `{instance[:200]}`")
        row = find_attempt(reader, found, sample, attempt)
        yield from turns(conversation_of(reader, row.attempt))


def prepare(
    suite: Suite | str, agent: Agent | Act | str | None, out: str | Path | None, options: Options
) -> Prepared:
    """Check everything that can be checked before a run, and make nothing."""
    found = load_suite(suite) if isinstance(suite, str) else suite
    chosen = agent if agent is not None else found.defaults.agent
    if chosen is None:
        raise BadInput(f"which agent? suite `{found.name}` suggests none", "for example `--agent bash`")
    actor = _agent(chosen)
    names = (
        absolute_suite(suite) if isinstance(suite, str) else found.name,
        absolute_agent(chosen) if isinstance(chosen, str) else actor.name,
    )
    importable = isinstance(suite, str) and isinstance(chosen, str)
    config = build(found, actor, names, settings(options))
    _check(found, actor, config)
    check_variables(found, config, environment())
    path = Path(out) if out is not None else default_directory(found.name)
    critic = options.get("critic")
    own = critic if critic is not None and not isinstance(critic, str) else None
    return Prepared(path, config, found, actor, importable and own is None, own)


async def start(prepared: Prepared, around: Around) -> Summary:
    """Make the run directory of a prepared run and conduct it."""
    await check_start(prepared)
    policy = around.get("policy")
    if prepared.config.sandbox is SandboxKind.DOCKER:
        await check_daemon(environment())
    async with _upstream(prepared.config, policy) as upstream:
        directory = create(prepared.path, prepared.config)
        given = given_to(prepared.suite, prepared.agent, around)
        importable = prepared.importable and policy is None
        given = msgspec.structs.replace(
            given, importable=importable, upstream=upstream, critic=prepared.critic or given.critic
        )
        return await conducted(directory, given, around)


def _check(suite: Suite, agent: Agent, config: RunConfig) -> None:
    """What suite and agent refuse; a program that is missing here may be in containers or mounts."""
    if suite.check is not None:
        suite.check()
    try:
        if agent.check is not None:
            agent.check()
    except RunFailed as error:
        here = config.sandbox is SandboxKind.PROCESS and not config.mounts
        if error.kind != AGENT_MISSING or here:
            raise BadInput(error.message, error.hint) from None  # nothing has been made yet
    if config.sandbox is SandboxKind.PROCESS:
        check_mounts(config.mounts, probe())
        check_directories(agent.paths, config.sandbox_root, config.mounts, probe())


async def check_start(prepared: Prepared) -> None:
    """Refuse a run of which no instance could be tried: none is chosen, or the agent has no model."""
    config, suite = prepared.config, prepared.suite
    if config.model is None and config.replays is None and prepared.agent.needs_model:
        name = prepared.agent.name.rpartition("/")[2]  # its file may lie anywhere
        raise BadInput(f"agent `{name}` calls the model, and the run has none", "give one with `--model`")
    if suite.size == 0:
        raise BadInput(f"suite `{suite.name}` has no instances")
    if config.only and not await first_instances(suite, config, 1):
        patterns = ", ".join(f"`{pattern}`" for pattern in config.only)
        there = await first_instances(suite, msgspec.structs.replace(config, only=()), NAMED)
        raise BadInput(
            f"no instance of suite `{suite.name}` matches `--only`: {patterns}",
            f"it has, for example, {', '.join(f'`{name}`' for name in there)}" if there else "",
        )


def _agent(agent: Agent | Act | str) -> Agent:
    if isinstance(agent, str):
        return load_agent(agent)
    return agent if isinstance(agent, Agent) else python_agent(agent)


@asynccontextmanager
async def _upstream(config: RunConfig, policy: Policy | None = None) -> AsyncIterator[Upstream | None]:
    """Where the run's model calls go; the scripted model is served here."""
    if policy is not None:
        yield None
        return
    if config.model != SCRIPTED or config.replays is not None:
        yield upstream_of(config, environment())
        return
    from ..suite.demo.script import reply
    from ..testing.scripted import serve

    async with serve(reply) as url:
        yield Upstream(everywhere=Provider(url=url))
