"""Conducts a run from its directory to its end: lock, recover, compare the suite, conduct, summarize.

`create_run` makes the directory; `conduct_run` runs or resumes it. A failed run has a summary too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    nullcontext,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..core.authoring import Agent, CriticFunction, Policy, ResourceWrapper, Suite
from ..core.config import CriticKind, RunConfig
from ..core.errors import HoldwaterError
from ..core.masking import hide_values
from ..core.policy import exit_status
from ..core.sandbox_kind import ProvisionSite, SandboxProvision
from ..core.summary import RunSummary
from ..governor.leases import AttemptLeases
from ..governor.memory_control import LOOK_SECONDS, MemoryControl
from ..governor.meter import ResourceMeter
from ..governor.run_usage import RunUsage
from ..ledger.directory import RunDirectory
from ..ledger.durable_files import replace_file
from ..ledger.journal import recover
from ..ledger.ledger import Ledger
from ..ledger.reader import LedgerReader
from ..ledger.regrades import latest_regrade, list_refusals
from ..rollout.logs import RunLog, route_output
from ..rollout.periodic_task import PeriodicTask
from ..rollout.process_health import LoopLag, PausableClock
from ..rollout.sandbox_kinds import UNISOLATED, find_kind
from ..rollout.worker_protocol import UpstreamConfig, WorkerSetup
from ..sandbox.scratch import claim
from .conductor.admission import AttemptAdmission
from .conductor.control import ControlledParts, RunControl
from .conductor.control_socket import listen_for_control
from .conductor.feed import EmptyFeed, RunFeed, SampleFeed, compare_suite
from .conductor.instance_selection import InstanceSelection
from .conductor.instance_source import InstanceSource
from .conductor.observers import Observer, VerdictObservers
from .conductor.regrade import RegradeFeed, RegradeRequest
from .conductor.replay import make_earlier_lookup
from .conductor.run_tasks import RunInbox, convert_cancellation, current_task
from .conductor.scheduler import AttemptScheduler, RunParts
from .conductor.signals import CommandSignals
from .conductor.timeline import TimelineWriter
from .fleet.endpoint_tally import EndpointTotals
from .fleet.inline import InlineFleet
from .fleet.interface import Emit, GovernedFleet
from .fleet.local import LocalFleet
from .orders.catalogue import InstanceCatalogue
from .orders.order_book import OrderBook
from .orders.order_service import OrderService
from .orders.server_status import ServerStatus
from .resources.budget import BudgetWatch
from .resources.disk_space import DiskControls, DiskSpace
from .resources.retention import FileRetention
from .resources.run_places import list_places, sweep_all, sweep_leftovers
from .setup.config import ProcessEnvironment, forms_groups, select_passed_variables
from .setup.resumption import change_settings, reopen_samples

if TYPE_CHECKING:
    from .builds.build_run import ImageBuildRun

BUDGET_SECONDS = 1.0


class RunSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is ready to start: everything is checked, nothing is created yet."""

    path: Path
    config: RunConfig
    suite: Suite
    agent: Agent
    environment: ProcessEnvironment
    selection: InstanceSelection | None = None  # the chosen instances; None: all
    agent_env: dict[str, str] = {}  # variables of the agent's commands; their values are in no file
    importable: bool = True  # workers can load the suite and the agent by their names
    upstream: UpstreamConfig | None = None  # where model calls go
    # Functions of this process, which workers cannot load.
    policy: Policy | None = None  # answers model calls instead of an upstream
    critic: CriticFunction | None = None  # instead of the critic that the run names
    enclose: ResourceWrapper | None = None  # for attempts that run in this process
    # Another kind of work than running agents.
    build_run: ImageBuildRun | None = None  # a build of images, instead of suite, agent and workers
    open_server: Callable[[OrderService, Callable[[str], None]], AbstractAsyncContextManager[Any]] | None = (
        None  # for clients, if the run is a server
    )
    regrade: RegradeRequest | None = None  # grade kept work
    # A resume.
    resumed: bool = False  # the directory is there
    accept_changes: bool = False
    retry: Sequence[str] = ()  # closed samples to reopen: words of `RetryChoice`, or patterns
    afterwards: Callable[[], RunSetup] | None = None  # the run itself, after its regrade is finished
    # Hooks of the caller.
    begun: Callable[[RunDirectory], None] = lambda directory: None  # the directory exists, nothing runs yet
    observers: Sequence[Observer] = ()
    say: Callable[[str], None] = lambda line: None  # for lines that belong to no attempt
    signals: CommandSignals | None = None  # of the command, if there is one
    periodic_tasks: Sequence[PeriodicTask] = ()


def create_run(path: Path, config: RunConfig, selection: InstanceSelection | None = None) -> RunDirectory:
    """Create a run directory that can be conducted. After a kill on the way it can be created again."""
    directory = RunDirectory.create(path)
    with directory.lock():
        Ledger.create(directory)
        if selection is not None:
            replace_file(directory.selection, selection.content)
        directory.write_config(config)
    return directory


async def conduct_run(directory: RunDirectory, given: RunSetup) -> RunSummary:
    """Run or resume until everything is settled or an error stops the run; the summary says which."""
    config = given.config
    if given.regrade is not None:
        # A regrade calls no critic.
        config = msgspec.structs.replace(config, critic=CriticKind.GRADE)
    signals = given.signals or CommandSignals()
    with ExitStack() as stack:
        stack.enter_context(hide_values(given.agent_env))
        stack.enter_context(directory.lock())
        config = msgspec.structs.replace(config, id=directory.identify(config.id))
        stack.enter_context(signals.attach_loop(asyncio.get_running_loop()))
        log = stack.enter_context(closing(RunLog(directory.path / "run.log", given.say)))
        stack.enter_context(route_output(log.say))
        stack.enter_context(claim(directory.sandbox_root(config)))
        sweep_all(directory, config)
        space, clock = DiskSpace(config, directory, list_places(directory, config)), PausableClock()
        ledger = Ledger(directory, relieve=space.relieve, clock=clock.time)
        control = RunControl(config, ledger, clock, signals)
        async with ledger, listen_for_control(ledger, control):
            await recover(ledger, directory)
            await control.tell_earlier_pause(log.say)
            await _tell_isolation(ledger, config, given, log.say)
            if given.resumed and config.serving is None:
                await change_settings(ledger, given.config)
            if (asked := given.regrade) is not None:
                await ledger.begin_regrade(asked.grader, asked.only, asked.continues)
            try:
                with convert_cancellation(signals):
                    async with given.build_run or nullcontext():
                        await _conduct(config, ledger, space, given, log.say, control)
                    log.check()
            except HoldwaterError as error:
                await _end(ledger, directory, config, error)
            else:
                await _end(ledger, directory, config, None)
            finally:
                sweep_leftovers(directory, config)
                space.close()
    with LedgerReader(directory) as reader:
        return reader.summary()


async def _conduct(
    config: RunConfig,
    ledger: Ledger,
    space: DiskSpace,
    given: RunSetup,
    say: Callable[[str], None],
    control: RunControl,
) -> None:
    if given.build_run is None and config.serving is None:  # the first line of a server says where it listens
        say(f"network: `{config.network}`, unless an instance names another\n")
        for note in given.agent.notes if given.regrade is None else ():
            say(f"note: {note}\n")
    places = list_places(ledger.directory, config)
    usage = RunUsage(ResourceMeter(places, config.memory, given.environment.memory_request))
    timeline = TimelineWriter(ledger, usage, space)
    async with AsyncExitStack() as stack:
        with control.signals.answer_with(current_task().cancel):
            provision = await timeline.measure_setup(_open_provision(config, ledger, given, stack))
            if provision.store is not None:
                space.use_store(provision.store)
            feed = await timeline.measure_setup(_make_feed(config, ledger, space, given, say))
        loop = asyncio.get_running_loop()
        observers = VerdictObservers(
            given.observers,
            lambda kind, message: asyncio.run_coroutine_threadsafe(ledger.note(kind, message), loop),
        )
        elsewhere = find_kind(config.sandbox).elsewhere
        leases = AttemptLeases(config, usage, space.bound, given.agent, elsewhere=elsewhere)
        around = _RunServices(given, ledger, space, usage, leases, timeline, provision, control)
        try:
            await _schedule(config, feed, observers, RunInbox(say), around)
        finally:
            for missed in await asyncio.to_thread(observers.close):
                await ledger.note("observer.behind", missed)


class _RunServices(NamedTuple):
    """The services around the schedule of a run."""

    given: RunSetup
    ledger: Ledger
    space: DiskSpace
    usage: RunUsage
    leases: AttemptLeases
    timeline: TimelineWriter
    provision: SandboxProvision
    control: RunControl


async def _schedule(
    config: RunConfig,
    feed: SampleFeed,
    observers: VerdictObservers,
    inbox: RunInbox,
    around: _RunServices,
) -> None:
    """Run until everything is settled, with all periodic tasks beside it."""
    given, ledger, space, usage, leases, timeline, provision, control = around
    watch = BudgetWatch(config, ledger, control.clock.time)
    retention = FileRetention(config, ledger.directory, ledger)
    if given.regrade is None:
        await watch.begin()
    async with _open_fleet(_make_worker_setup(config, ledger, given, provision), inbox.put, given) as fleet:
        book = None
        if config.serving is not None and isinstance(fleet, LocalFleet | InlineFleet):
            book = OrderBook(config, ledger, fleet, (await ledger.counts()).outcomes)
        admission = AttemptAdmission(
            ledger, leases, make_earlier_lookup(config, ledger), provision.images, book
        )
        parts = RunParts(feed, admission, fleet, inbox, space, observers, book, control.clock)
        scheduler = AttemptScheduler(config, ledger, await ledger.next_attempt(), parts)
        memory = MemoryControl(config, usage, leases, fleet, scheduler.preempt, inbox.note)
        levers = DiskControls(
            leases.hold, leases.release, inbox.note, scheduler.stop, lambda: scheduler.running
        )
        lag, endpoints = LoopLag(), EndpointTotals(ledger, fleet.take_census)
        further = given.build_run.periodic_tasks(leases) if given.build_run else ()
        regular = (
            PeriodicTask("governor", LOOK_SECONDS, memory.look_if_due),
            timeline.periodic_task(scheduler, leases, lag, lambda: book.calls.held_count if book else 0),
            PeriodicTask("budget", BUDGET_SECONDS, lambda: watch.look(fleet, scheduler.stop)),
            endpoints.periodic_task(),
        )
        further = (*further, *provision.periodic_tasks(scheduler, leases), *given.periodic_tasks)
        duties = (*regular, *further, *retention.periodic_tasks)
        grouped = config.serving is None and forms_groups(given.suite, config)
        changes = [part.change for part in (usage, leases, space, memory, watch, fleet, scheduler)]
        attached = control.attach(ControlledParts(scheduler, admission, fleet, grouped, changes, inbox.note))
        answered = control.signals.answer_with(control.drain, scheduler.leave)
        async with _open_orders(config, scheduler, fleet, book, around) as service:
            with lag, attached, answered, space.watch_run(levers) as watches:
                try:
                    await scheduler.run((*duties, *service, *watches))
                    if ledger.regrade is not None:
                        await ledger.switch_outcomes(config.keep)
                    await endpoints.write()
                    await retention.finish()
                finally:
                    await retention.close()


def _make_worker_setup(
    config: RunConfig, ledger: Ledger, given: RunSetup, provision: SandboxProvision
) -> WorkerSetup:
    return WorkerSetup(
        config=config,
        directory=str(ledger.directory.path.absolute()),
        worker=0,
        token=ledger.token,
        upstream=given.upstream,
        path=given.environment.path,
        variables=select_passed_variables(config, given.environment),
        agent_env=given.agent_env,
        provided=provision.provided,
    )


async def _tell_isolation(
    ledger: Ledger, config: RunConfig, given: RunSetup, say: Callable[[str], None]
) -> None:
    """Report once, before anything runs, which isolation the sandboxes lack."""
    if given.build_run is not None or (warning := find_kind(config.sandbox).warn(config)) is None:
        return
    event, sentence = warning
    await ledger.note(event, sentence)
    if event == UNISOLATED:
        await ledger.remember("open", sentence.encode())
    say(f"{'warning' if event == UNISOLATED else 'note'}: {sentence}\n")


async def _open_provision(
    config: RunConfig, ledger: Ledger, given: RunSetup, stack: AsyncExitStack
) -> SandboxProvision:
    """Open everything that sandboxes of this kind need in the conductor, such as networks and images."""
    provide = find_kind(config.sandbox).provision
    if provide is None or given.build_run is not None:
        return SandboxProvision()
    site = ProvisionSite(config, ledger.directory.logs, given.environment, ledger)
    return await stack.enter_async_context(provide(site))


async def _make_feed(
    config: RunConfig, ledger: Ledger, space: DiskSpace, given: RunSetup, say: Callable[[str], None]
) -> SampleFeed:
    """Return the source of samples; a resume first checks that the suite still matches the plan."""
    if given.build_run is not None:
        await given.build_run.set_up(config.id, space)
        await reopen_samples(ledger, given.retry)
        return await given.build_run.feed(ledger, given.resumed)
    if given.regrade is not None:
        return RegradeFeed(ledger, given.regrade.only, grouped=forms_groups(given.suite, config))
    if config.serving is not None:
        return EmptyFeed()
    if given.resumed:
        planned = InstanceSource(given.suite, config, given.selection)
        await compare_suite(ledger, planned, accept=given.accept_changes)
        await reopen_samples(ledger, given.retry)
    source = InstanceSource(given.suite, config, given.selection)
    await ledger.set_total(None if source.total is None else source.total * config.samples)
    grouped = forms_groups(given.suite, config)
    return RunFeed(config, ledger, source, resumed=given.resumed, grouped=grouped, say=say)


@asynccontextmanager
async def _open_fleet(welcome: WorkerSetup, emit: Emit, given: RunSetup) -> AsyncIterator[GovernedFleet]:
    if given.build_run is not None:
        async with given.build_run.fleet(welcome.token, emit) as fleet:
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
async def _open_orders(
    config: RunConfig,
    scheduler: AttemptScheduler,
    fleet: GovernedFleet,
    book: OrderBook | None,
    around: _RunServices,
) -> AsyncIterator[Sequence[PeriodicTask]]:
    """Accept orders if the run is a server's; yield the periodic tasks of the server."""
    given, ledger, _, usage, leases, timeline, _, _ = around
    if book is None or given.open_server is None:
        yield ()
        return
    assert isinstance(fleet, LocalFleet | InlineFleet)
    status = ServerStatus(ledger, fleet, book, scheduler, leases, usage, timeline)
    catalogue = InstanceCatalogue(given.suite, given.agent, config, ledger)
    service = OrderService(config, ledger, catalogue, book, scheduler, fleet, status)
    async with service.accept_orders(), given.open_server(service, given.say):
        yield status.periodic_tasks()


async def _end(
    ledger: Ledger, directory: RunDirectory, config: RunConfig, error: HoldwaterError | None
) -> None:
    """Settle leftovers and record how the run ended."""
    await recover(ledger, directory)
    if error is None:
        with LedgerReader(directory) as reader:
            status = _find_status(reader)
        await ledger.finish("finished", "", status)
        return
    state = {3: "interrupted"}.get(error.exit_status, "stopped")
    hint = f"; {error.hint}" if error.hint else ""
    await ledger.finish(state, f"{error.message}{hint}", error.exit_status)


def _find_status(reader: LedgerReader) -> int:
    """Return 0 if everything is settled, 1 if infrastructure failures are left, also of the last regrade."""
    regrade = latest_regrade(reader)
    failed = list_refusals(reader, regrade.id) if regrade is not None else ()
    left = [*reader.failures(), *((str(where), where) for where in failed)]
    return max((exit_status(kind, where) for kind, where in left), default=0)
