"""The sandboxes of this machine that a sandbox server gives away, inside its budget of memory, disk and CPU.

It is a run without a ledger: the kinds of sandboxes, the leases, the governor and the images of a docker
daemon are those of runs. `client_session.py` says to which client a sandbox belongs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from ...core.authoring import ManagedSandbox, SandboxProvider
from ...core.config import RunConfig
from ...core.errors import AttemptError, AttemptInterrupted, HoldwaterError, RunStopped, SandboxFailed
from ...core.failures import SERVER, TAKEN_BACK
from ...core.records import (
    Attempt,
    AttemptFailure,
    FailureOrigin,
    LimitOverrides,
    Limits,
    Network,
    SandboxSpec,
    Verdict,
)
from ...core.sandbox_kind import OpenedSandboxes, ProvisionSite, SandboxProvision, SandboxSite
from ...core.sandbox_protocol import HoldPlace, SandboxUsage
from ...governor.leases import AttemptLeases
from ...governor.memory_control import LOOK_SECONDS, MemoryControl
from ...governor.meter import ResourceMeter
from ...governor.resource_reading import AttemptUse, FleetCensus
from ...governor.run_usage import RunUsage
from ...ledger.directory import RunDirectory
from ...rollout.attempt_rules import apply_lease
from ...rollout.periodic_task import PeriodicTask
from ...rollout.process_health import LoopLag
from ...rollout.sandbox_kinds import find_kind
from ...rollout.worker_protocol import AttemptJob
from ...run.conductor.admission import ImageRequest
from ...run.resources.disk_space import DiskControls, DiskSpace
from ...run.resources.run_places import list_places
from ...run.setup.config import ProcessEnvironment
from ...shielded_wait import run_uncancellable
from .group_leases import GroupLeases

THREADS = 16  # each packs or unpacks the tree of one call
CLOSING = 30.0  # seconds for closing one sandbox
GIVEN_BACK = "the place of the sandbox was given back"
OPENNESS = (Network.NONE, Network.GATEWAY, Network.OPEN)


class HostedPlace:
    """The lease of one sandbox, and the sandbox once it is open."""

    def __init__(self, number: int, job: AttemptJob, group: GroupLeases | None) -> None:
        self.number = number  # of this server: its directory or container has it
        self.group = group
        self.sandbox: ManagedSandbox | None = None
        self.ended: AttemptError | None = None  # why the server took the sandbox back
        self.over = False
        self.job = job
        self.stack = AsyncExitStack()

    @property
    def images(self) -> dict[str, str]:
        """The image specs of the place -> the daemon's images."""
        return self.job.images

    @property
    def usage(self) -> SandboxUsage:
        """The use of the sandbox so far."""
        sandbox = self.sandbox
        if sandbox is None:
            return SandboxUsage()
        return SandboxUsage(
            peak_memory=sandbox.peak_memory,
            peak_disk=sandbox.peak_disk,
            outside=sandbox.outside,
            leftovers=tuple(sandbox.leftovers),
        )


class NoteLedger:
    """Takes the notes that a run would write to its ledger."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note

    async def note(self, kind: str, message: str, attempt: int | None = None) -> None:
        self._note(kind, message)


class SandboxHost:
    """All places of one server. For the governor it is a fleet without processes: `GovernedWorkers`."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        environment: ProcessEnvironment,
        note: Callable[[str, str], None],
        *,
        builds: bool = False,
    ) -> None:
        self.config = config
        self.builds = builds  # of Dockerfiles, whose commands are on the daemon's network
        self.places: dict[int, HostedPlace] = {}  # bound: the memory of this machine
        self.note = note
        self.failure: HoldwaterError | None = None  # why the server cannot go on
        self.on_failure: Callable[[], None] = lambda: None
        self._directory = directory
        self._environment = environment
        self._number = 0
        places = list_places(directory, config)
        self._space = DiskSpace(config, directory, places)
        self._usage = RunUsage(ResourceMeter(places, config.memory, environment.memory_request))
        self._leases = AttemptLeases(config, self._usage, self._space.bound)
        self._lag = LoopLag()
        self._provision = SandboxProvision()
        self._opened: OpenedSandboxes | None = None
        self._ending: set[asyncio.Task[None]] = set()  # bound: the places
        self.logs = directory.logs
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="holdwater-trees")
        self.spools = directory.sandbox_root(config) / "calls"  # for the files of calls

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SandboxHost]:
        """Open everything that sandboxes need, until the block ends."""
        config, kind = self.config, find_kind(self.config.sandbox)
        async with AsyncExitStack() as stack:
            stack.callback(self._space.close)
            self.spools.mkdir(mode=0o700, exist_ok=True)
            stack.callback(self.threads.shutdown, wait=False)
            if kind.provision is not None:
                site = ProvisionSite(config, self._directory.logs, self._environment, NoteLedger(self.note))
                self._provision = await stack.enter_async_context(kind.provision(site))
            if self._provision.store is not None:
                self._space.use_store(self._provision.store)
            self._opened = await stack.enter_async_context(kind.open(self._make_site()))
            levers = DiskControls(
                self._leases.hold, self._leases.release, self.note, self.stop, lambda: len(self.places)
            )
            watches = stack.enter_context(self._space.watch_run(levers))
            stack.enter_context(self._lag)
            control = MemoryControl(
                config, self._usage, self._leases, self, self._take_back_for_memory, self.note
            )
            if config.concurrency is not None:
                self._leases.gate.limit_attempts(config.concurrency)
            control.look()
            duties = (
                PeriodicTask("governor", LOOK_SECONDS, control.look_if_due),
                *watches,
                *self._provision.periodic_tasks(self, self._leases),
            )
            tasks = [asyncio.ensure_future(self._perform(duty)) for duty in duties]
            stack.push_async_callback(_cancel_all, tasks)
            stack.push_async_callback(self._end_all)
            yield self

    @property
    def provider(self) -> SandboxProvider:
        assert self._opened is not None, "used before it is open"
        return self._opened.provider

    @property
    def gateway_address(self) -> str:
        """The address of this machine at which sandboxes reach a gateway; empty: it is a unix socket."""
        assert self._opened is not None, "used before it is open"
        return self._opened.gateway_address

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a lease."""
        return len(self._leases.waiting)

    @property
    def leased(self) -> int:
        return self._leases.leased

    @property
    def room(self) -> tuple[int, int]:
        """Bytes of memory and of disk that can still be leased."""
        return max(0, self._leases.room), max(0, self._leases.gate.disk.room)

    def list_unsettled(self) -> Collection[int]:
        """Return the numbers of the places: a container of another number is an orphan."""
        return self.places.keys()

    def stop(self, error: HoldwaterError) -> None:
        """End the server, because its disk or its daemon is gone for too long."""
        self.failure = self.failure or error
        self.on_failure()

    def open_group(self) -> GroupLeases:
        """Return the leases of a new group, which its holder closes."""
        return GroupLeases(self._leases, self._number_place)

    async def hold(self, request: HoldPlace, group: GroupLeases | None = None) -> HostedPlace:
        """Wait for memory, disk and images; return the place, which `end` gives back."""
        self._check_network(request.start)
        attempt = self._number_place()
        asks = LimitOverrides(memory=request.limits.memory, disk=request.limits.disk)
        images = self._provision.images
        wanted = ImageRequest(id=request.id, start=request.start, grader=request.grader)
        place: HostedPlace | None = None
        try:
            need = await images.estimate_need(wanted) if images is not None else 0
            if group is None:
                lease = await self._leases.lease(attempt, asks, need)
            else:
                lease = await group.lease(attempt, asks, need, request.members)
            if isinstance(lease, AttemptFailure):
                message = f"the sandbox server cannot give so much: {lease.message}"
                raise SandboxFailed(message, kind=lease.kind, again=lease.again)
            found = await images.hold(attempt.id, wanted) if images is not None else {}
            self._leases.end_image_lease(attempt.id, need)
            memory, quota = self._leases.derive_limits(attempt.id, lease)
            job = AttemptJob(attempt=attempt, payload=b"", lease=memory, quota=quota, images=found)
            place = self.places[attempt.id] = HostedPlace(attempt.id, job, group)
            return place
        finally:
            if place is None:
                self._give_back(attempt.id, 0, group)

    async def open_sandbox(
        self, place: HostedPlace, start: SandboxSpec, limits: Limits, gateway: Path | None
    ) -> ManagedSandbox:
        """Open the sandbox of a place."""
        self._check_network(start)
        if place.over:
            raise place.ended or AttemptInterrupted(GIVEN_BACK, kind=SERVER)
        limits = apply_lease(msgspec.structs.replace(limits, lease=None), place.job)
        opening = self.provider.open(place.number, limits, gateway, start)
        place.sandbox = await place.stack.enter_async_context(opening)
        if place.number not in self.places:  # it was ended meanwhile
            await place.stack.aclose()
            raise place.ended or AttemptInterrupted(GIVEN_BACK, kind=SERVER)
        return place.sandbox

    async def end(self, place: HostedPlace) -> None:
        """Close the sandbox of a place, if it is open, and give the place back. It is done once."""
        if place.over:
            return
        place.over = True
        await run_uncancellable(place.stack.aclose(), CLOSING, self.note, f"sandbox {place.number}")
        peak = place.sandbox.peak_memory if place.sandbox is not None else 0
        for left in place.sandbox.leftovers if place.sandbox is not None else ():
            self.note("sandbox.leftover", left)
        self.places.pop(place.number, None)
        self._give_back(place.number, peak, place.group)

    def take_back(self, place: HostedPlace, error: AttemptError) -> None:
        """End a place soon; calls of its sandbox raise this error."""
        place.ended = place.ended or error
        task = asyncio.ensure_future(self.end(place))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def permit_network(self, network: Network) -> None:
        """Refuse a network that is more open than the server's."""
        if OPENNESS.index(network) > OPENNESS.index(self.config.network):
            raise SandboxFailed(
                f"the sandbox server gives no sandbox the network `{network}`",
                f"`holdwater sandboxd --network {network}`",
                kind="network",
                again=False,
            )

    # What the governor calls: see `GovernedWorkers`.

    def take_census(self) -> FleetCensus:
        uses = {
            number: AttemptUse(
                sandbox=place.sandbox.memory, disk=place.sandbox.disk, cpu=place.sandbox.cpu_seconds
            )
            for number, place in self.places.items()
            if place.sandbox is not None
        }
        return FleetCensus(workers=0, lag=self._lag.take(), uses=uses)

    @property
    def memory_version(self) -> int:
        return sum(place.sandbox.memory for place in self.places.values() if place.sandbox is not None)

    def allow_memory(self, attempt: int, memory: int) -> None:
        place = self.places.get(attempt)
        if place is not None and place.sandbox is not None:
            place.sandbox.allow_memory(memory)

    def permit_growth(self, leases: Mapping[int, int], room: int) -> None:
        """Do nothing: there are no workers."""

    def trim(self) -> str:
        return ""

    def recycle(self, least: int, *, at_once: bool) -> str:
        return ""

    def _take_back_for_memory(self, number: int) -> bool:
        place = self.places.get(number)
        if place is None or place.over or place.ended is not None:
            return False
        reason = "the sandbox server took the sandbox back: memory was short"
        self.take_back(place, AttemptInterrupted(reason, kind=TAKEN_BACK))
        return True

    def _check_network(self, start: SandboxSpec) -> None:
        self.permit_network(start.network or self.config.network)

    def _make_site(self) -> SandboxSite:
        config = self.config
        return SandboxSite(
            config=config,
            directory=self._directory.path,
            scratch=self._directory.sandbox_root(config),
            path=self._environment.path,
            provided=self._provision.provided,
        )

    def _number_place(self) -> Attempt:
        self._number += 1
        return Attempt(id=self._number, instance=0, sample=0, number=1)

    def _give_back(self, number: int, peak: int, group: GroupLeases | None) -> None:
        """Return the lease and the images of a place, and learn from its use."""
        if (images := self._provision.images) is not None:
            images.release(number)
        # A place that was never used says nothing about the next one.
        failure = None if peak else AttemptFailure(FailureOrigin.INTERRUPTED, "unused", "never used")
        verdict = Verdict(attempt=number, token=0, peak_memory=peak, failure=failure)
        (self._leases.on_settled if group is None else group.take_back)(verdict)

    async def _perform(self, duty: PeriodicTask) -> None:
        try:
            await duty.perform(self.note)
        except RunStopped as error:
            self.stop(error)

    async def _end_all(self) -> None:
        await asyncio.gather(*(self.end(place) for place in list(self.places.values())))
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSING)


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
