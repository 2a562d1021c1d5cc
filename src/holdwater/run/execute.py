"""From a run directory to its end: lock, recover, compare, conduct, and a summary whatever happened.

`create` makes the directory, `conduct` runs or resumes what is in it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from ..core.authoring import Agent, Critique, Enclose, Suite
from ..core.config import Critic, RunConfig, SandboxKind, SandboxRoot
from ..core.errors import HoldwaterError
from ..core.policy import exit_status
from ..core.summary import Summary
from ..gateway.upstreams.policy import Policy
from ..governor.meter import Meter
from ..ledger.directory import RunDirectory
from ..ledger.ledger import Ledger
from ..ledger.reader import Reader
from ..ledger.recovery import recover
from ..ledger.regrades import latest_regrade, refusals
from ..rollout.duty import Duty
from ..rollout.lag import Lag
from ..rollout.logs import routed
from ..rollout.wire import Upstream, Welcome
from ..sandbox.isolation import describe_missing_isolation
from ..sandbox.probe import probe
from ..sandbox.scratch import bury, claim, temporary_places, temporary_prefix
from ..sandbox.sweep import sweep
from ..sandbox.visibility import HOST_SHOWN
from .budget import BudgetWatch
from .catalogue import Catalogue
from .config import Environment, passed_variables
from .desk import Desk
from .feed import Feed, NoFeed, RunFeed, compare
from .fleet import Emit, Governed
from .governor import Governor
from .inline import InlineFleet
from .local import LocalFleet
from .log import RunLog
from .observers import Observer, Observers
from .provision import Provision
from .regrade import RegradeFeed, RegradeRequest
from .replay import earlier_in
from .resumption import change_settings, reopen_samples
from .retention import Retention
from .scheduler import Scheduler, interruption
from .service import Service
from .signals import Signals
from .source import Source
from .space import Levers, Space
from .timeline import Timeline

BUDGET_SECONDS = 1.0


class Conduct(msgspec.Struct, frozen=True, kw_only=True):
    """What a conductor is given beside the run itself."""

    suite: Suite
    agent: Agent
    environment: Environment
    upstream: Upstream | None = None  # where model calls go
    resumed: bool = False
    accept_changes: bool = False
    importable: bool = True  # workers can load the suite and the agent by their names
    observers: Sequence[Observer] = ()
    say: Callable[[str], None] = lambda line: None  # lines that belong to no attempt
    signals: Signals | None = None  # of the command, where there is one
    regrade: RegradeRequest | None = None  # kept work is graded in the place of running agents
    duties: Sequence[Duty] = ()
    enclose: Enclose | None = None  # for attempts that live in this process
    policy: Policy | None = None  # what answers model calls, in the place of an upstream
    critic: Critique | None = None  # a function, in the place of what the run names
    retry: Sequence[str] = ()  # closed samples that are opened again: words of `Retry`, or patterns
    works: Works | None = None  # in the place of suite, agent and workers: a build of images
    config: RunConfig | None = None  # in the place of the run's own, where it goes on
    door: Callable[[Desk], AbstractAsyncContextManager[Any]] | None = None  # where a server's clients come in


class Works(Protocol):
    """What is conducted in the place of agents; opened and closed around it with `async with`."""

    async def set_up(self, run: str, space: Space) -> None:
        """What has to be there before the first attempt; measured, and a signal ends it."""

    async def feed(self, ledger: Ledger, resumed: bool) -> Feed: ...

    def fleet(self, token: int, emit: Emit) -> AbstractAsyncContextManager[Governed]: ...

    def duties(self, governor: Governor) -> Sequence[Duty]: ...

    async def __aenter__(self) -> Works: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def create(path: Path, config: RunConfig) -> RunDirectory:
    """A run directory that can be conducted. A kill on the way leaves one that can be created again."""
    directory = RunDirectory.create(path)
    with directory.lock():
        Ledger.create(directory)
        directory.write_config(config)
    return directory


async def conduct(directory: RunDirectory, given: Conduct) -> Summary:
    """Run, or resume, until everything is settled or something stops it. The summary says which."""
    config = given.config or directory.read_config()
    if given.regrade is not None:
        config = msgspec.structs.replace(config, critic=Critic.GRADE)  # no critic is asked about a regrade
    signals = given.signals or Signals()
    with ExitStack() as stack:
        stack.enter_context(directory.lock())
        config = msgspec.structs.replace(config, id=directory.identify(config.id))
        stack.enter_context(signals.heard(asyncio.get_running_loop()))
        log = stack.enter_context(closing(RunLog(directory.path / "run.log", given.say)))
        stack.enter_context(routed(log.say))
        stack.enter_context(claim(directory.sandboxes(config)))
        for place in {directory.sandboxes(config).parent, *temporary_places()}:
            bury(place)
        _sweep(directory, config)
        space = Space(config, directory, _places(directory, config))
        async with Ledger(directory, relieve=space.relieve) as ledger:
            await recover(ledger, directory)
            await _tell_isolation(ledger, config, given, log.say)
            if given.config is not None and config.serving is None:
                await change_settings(ledger, given.config)
            if (asked := given.regrade) is not None:
                await ledger.begin_regrade(asked.grader, asked.only, asked.continues)
            try:
                with _interruptible(signals):
                    async with given.works or nullcontext():
                        await _conduct(config, ledger, space, given, log.say, signals)
                    log.check()
            except HoldwaterError as error:
                await _end(ledger, directory, config, error)
            else:
                await _end(ledger, directory, config, None)
            finally:
                _sweep(directory, config)
                space.close()
    with Reader(directory) as reader:
        return reader.summary()


async def _conduct(
    config: RunConfig,
    ledger: Ledger,
    space: Space,
    given: Conduct,
    say: Callable[[str], None],
    signals: Signals,
) -> None:
    if given.works is None and config.serving is None:  # the first line of a server says where it listens
        say(f"network: `{config.network}`, unless an instance names another\n")
        for note in given.agent.notes if given.regrade is None else ():
            say(f"note: {note}\n")
    meter = Meter(_places(ledger.directory, config), config.memory, given.environment.memory_request)
    timeline = Timeline(ledger, space)
    async with AsyncExitStack() as stack:
        with signals.answered(current().cancel):
            provision = await timeline.during(meter, _provision(config, ledger, given, stack))
            if provision is not None:
                space.keep_in(provision.supply)
            feed = await timeline.during(meter, _feed(config, ledger, space, given, say))
        loop = asyncio.get_running_loop()
        observers = Observers(
            given.observers,
            lambda kind, message: asyncio.run_coroutine_threadsafe(ledger.note(kind, message), loop),
        )
        earlier = earlier_in(config, ledger)
        scheduler = Scheduler(config, ledger, feed, observers, earlier, await ledger.next_attempt(), say)
        governor = Governor(config, meter, space.bound, scheduler.preempt, scheduler.note)
        scheduler.govern(governor, space, provision)
        try:
            await _schedule(config, scheduler, governor, _Around(given, space, timeline, provision), signals)
        finally:
            for missed in await asyncio.to_thread(observers.close):
                await ledger.note("observer.behind", missed)


class _Around(NamedTuple):
    """What surrounds the schedule of a run."""

    given: Conduct
    space: Space
    timeline: Timeline
    provision: Provision | None


async def _schedule(
    config: RunConfig, scheduler: Scheduler, governor: Governor, around: _Around, signals: Signals
) -> None:
    """Run until everything is settled, with all that has to be done beside it."""
    given, space, ledger, provision = around.given, around.space, scheduler.ledger, around.provision
    welcome = Welcome(
        config=config,
        directory=str(ledger.directory.path.absolute()),
        worker=0,
        token=ledger.token,
        upstream=given.upstream,
        path=given.environment.path,
        variables=passed_variables(config, given.environment),
        containers=provision.containers if provision else None,
    )
    levers = Levers(
        governor.hold, governor.release, scheduler.note, scheduler.stop, lambda: scheduler.running
    )
    watch = BudgetWatch(config, ledger)
    retention = Retention(config, ledger.directory, ledger)
    if given.regrade is None:
        await watch.begin()
    async with (
        _fleet(welcome, scheduler.hear, given) as fleet,
        _served(config, scheduler, governor, fleet, around) as service,
    ):
        lag = Lag()
        budget = Duty("budget", BUDGET_SECONDS, lambda: watch.look(fleet, scheduler.stop))
        further = given.works.duties(governor) if given.works else ()
        if provision is not None:
            further = provision.duties(scheduler, governor)
        regular = (governor.duty(fleet), around.timeline.duty(scheduler, governor, lag), budget)
        duties = (*regular, *further, *service)
        answered = signals.answered(scheduler.drain, scheduler.leave)
        with lag, answered, space.begun(levers) as watches:
            try:
                await scheduler.run(fleet, (*duties, *given.duties, *watches, *retention.duties))
                if ledger.regrade is not None:
                    await ledger.switch_outcomes(config.keep)
                await retention.finish()
            finally:
                await retention.close()


async def _tell_isolation(
    ledger: Ledger, config: RunConfig, given: Conduct, say: Callable[[str], None]
) -> None:
    """Say once, before anything runs, what sandboxes are not kept from."""
    if config.sandbox is not SandboxKind.PROCESS or given.works is not None:
        return
    if missing := describe_missing_isolation(probe()):
        await ledger.note("sandbox.open", missing)
        await ledger.remember("open", missing.encode())
        say(f"warning: {missing}\n")
    elif config.sandbox_root is SandboxRoot.HOST:
        await ledger.note("sandbox.root", HOST_SHOWN)
        say(f"note: {HOST_SHOWN}\n")


async def _provision(
    config: RunConfig, ledger: Ledger, given: Conduct, stack: AsyncExitStack
) -> Provision | None:
    """What containers need, where sandboxes are containers."""
    if config.sandbox is not SandboxKind.DOCKER or given.works is not None:
        return None
    logs = ledger.directory.logs
    return await stack.enter_async_context(Provision(config, given.environment, ledger, logs))


async def _feed(
    config: RunConfig, ledger: Ledger, space: Space, given: Conduct, say: Callable[[str], None]
) -> Feed:
    """Where the samples come from; a resume looks first whether the suite is still what was planned."""
    if given.works is not None:
        await given.works.set_up(config.id, space)
        await reopen_samples(ledger, given.retry)
        return await given.works.feed(ledger, given.resumed)
    if given.regrade is not None:
        return RegradeFeed(ledger, given.regrade.only)
    if config.serving is not None:
        return NoFeed()
    if given.resumed:
        await compare(ledger, Source(given.suite, config), accept=given.accept_changes)
        await reopen_samples(ledger, given.retry)
    source = Source(given.suite, config)
    await ledger.expect(None if source.total is None else source.total * config.samples)
    return RunFeed(config, ledger, source, resumed=given.resumed, say=say)


@asynccontextmanager
async def _fleet(welcome: Welcome, emit: Emit, given: Conduct) -> AsyncIterator[Governed]:
    if given.works is not None:
        async with given.works.fleet(welcome.token, emit) as fleet:
            yield fleet
    elif welcome.config.workers == 0 or not given.importable:
        async with InlineFleet(
            welcome, emit, given.suite, given.agent, given.enclose, given.policy, given.critic
        ) as inline:
            yield inline
    else:
        async with LocalFleet(welcome, emit, given.environment.inherited) as local:
            yield local


@asynccontextmanager
async def _served(
    config: RunConfig, scheduler: Scheduler, governor: Governor, fleet: Governed, around: _Around
) -> AsyncIterator[Sequence[Duty]]:
    """Orders are taken, where the run is a server's; what has to be done beside that."""
    door = around.given.door
    if config.serving is None or door is None:
        yield ()
        return
    assert isinstance(fleet, LocalFleet | InlineFleet)
    service = Service(fleet, scheduler, governor, around.timeline)
    catalogue = Catalogue(around.given.suite, around.given.agent, config, scheduler.ledger)
    desk = Desk(config, catalogue, scheduler, fleet, service)
    scheduler.serve(desk)
    async with desk.opened(), door(desk):
        yield service.duties()


@contextmanager
def _interruptible(signals: Signals) -> Iterator[None]:
    """A signal that came before anything ran has cancelled us: the run ends as `interrupted`."""
    try:
        yield
    except asyncio.CancelledError:
        if not signals.count:
            raise
        current().uncancel()
        raise interruption() from None


def current() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


async def _end(
    ledger: Ledger, directory: RunDirectory, config: RunConfig, error: HoldwaterError | None
) -> None:
    """Settle what is left over, and write down how it ended."""
    await recover(ledger, directory)
    if error is None:
        with Reader(directory) as reader:
            status = _status(reader)
        await ledger.finish("finished", "", status)
        return
    state = {3: "interrupted"}.get(error.exit_status, "stopped")
    hint = f"; {error.hint}" if error.hint else ""
    await ledger.finish(state, f"{error.message}{hint}", error.exit_status)


def _status(reader: Reader) -> int:
    """0 when everything is settled, 1 when infrastructure failures are left, also of the last regrade."""
    regrade = latest_regrade(reader)
    failed = refusals(reader, regrade.id) if regrade is not None else ()
    left = [*reader.failures(), *((str(where), where) for where in failed)]
    return max((exit_status(kind, where) for kind, where in left), default=0)


def _sweep(directory: RunDirectory, config: RunConfig) -> None:
    """Remove what conductors of this run left: processes, sandboxes, sockets."""
    places = _places(directory, config)
    sweep(config.id, places["scratch"])
    for place in temporary_places():
        for left in place.glob(f"{temporary_prefix(config.id)}*"):
            shutil.rmtree(left, ignore_errors=True)


def _places(directory: RunDirectory, config: RunConfig) -> dict[str, Path]:
    """Where a run writes."""
    return {
        "run": directory.path,
        "scratch": directory.sandboxes(config),
        "temp": Path(tempfile.gettempdir()),
    }
