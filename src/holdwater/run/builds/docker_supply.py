"""Supplies images in a run: every image of an attempt's sandboxes is on the daemon before the attempt starts.

A missing image is made by the plan (`image_maker.py`), or pulled or built (`image/docker/image_store.py`).
Images of coming attempts are prefetched; idle images that holdwater made or pulled are removed when room is
needed. The supply waits only for pulls and builds: an attempt first requests `estimate_need`, and the
governor leases that much disk.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

import msgspec

from ...core.config import RunConfig
from ...core.errors import AttemptError, BadInput, ImageFailed, RunStopped
from ...core.image import EngineKind, ImageBlueprint, ImageEngine, ImagePlatform, ImageRecipe, Note
from ...core.records import AttemptFailure, GiB, SandboxSpec
from ...docker.client import DaemonGone, DockerClient, DockerError
from ...governor.disks import EASE_FACTOR, make_budget_room, make_disk_room
from ...governor.leases import AttemptLeases
from ...governor.resource_reading import DiskReading
from ...image.docker import failure_causes
from ...image.docker.daemon import DaemonDisk, find_daemon_disk, measure_disk
from ...image.docker.dockerfile import DockerfileContext, read_context
from ...image.docker.engine import BuildOptions, DockerEngine
from ...image.docker.image_store import DaemonImage, ImageKeeper, ImageStore
from ...image.registry.client import RegistryClients
from ...image.registry.credentials import RegistryCredentials
from ...image.registry.engine import RegistryEngine
from ...image.registry.lookup import RegistryLookup
from ...image.registry.reference import parse_reference
from ...rollout.periodic_task import PeriodicTask
from ..conductor.admission import ImageRequest
from ..setup.config import ProcessEnvironment
from .build_daemon import STORE, find_state_directory
from .engine_choice import open_engine
from .image_maker import ImageMaker, open_blueprint

PREFETCHES = 2  # at once
PREFETCH_SECONDS = 0.2
LONGEST_PREFETCH = 3600.0
RELIEF_SECONDS = 0.2
LONGEST_RELIEF = 600.0
VAIN_SECONDS = 2.0  # before the next search for room after a vain one, unless an image is released
GONE_PAUSE = 5.0  # seconds before the retry of an attempt whose daemon did not answer
MOST_EXPECTED = 1024
WARM = 10 * GiB  # at most this stays on the daemon after a run without a recipe ...
WARM_PART = 20  # ... and at most 1/20 of its disk


class ExpectedRequest(msgspec.Struct):
    """An image request that an attempt will make soon."""

    wanted: ImageRequest
    times: int = 0
    looked: bool = False  # it was prefetched, or need not be
    names: tuple[str, ...] = ()  # of its images on the daemon


class DockerSupply:
    """Opened with `async with` for one run. Implements `ImageSupply`, and `ExternalStore` once it is open."""

    def __init__(
        self, config: RunConfig, environment: ProcessEnvironment, client: DockerClient, note: Note, logs: Path
    ) -> None:
        self._config = config
        self._environment = environment
        self._client = client
        self._note = note
        self._logs = logs
        self._stack = AsyncExitStack()
        self._maker: ImageMaker | None = None
        self._held: dict[int, ExitStack] = {}  # bound: the run's concurrency
        self._expected: OrderedDict[str, ExpectedRequest] = OrderedDict()  # bound: MOST_EXPECTED
        self._prefetching: set[asyncio.Timeout] = set()  # bound: PREFETCHES
        self._stopped = False
        self._lost = False  # the daemon's disk cannot be read any more
        self._relieve_at = 0.0  # time of the next search for room

    async def __aenter__(self) -> DockerSupply:
        try:
            await self._open()
        except BaseException:  # boundary: close what was opened, then re-raise
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for attempt in list(self._held):
            self.release(attempt)
        await self._stack.aclose()

    # Called by the scheduler.

    async def estimate_need(self, wanted: ImageRequest) -> int:
        """Return the bytes that the images need; 0 without a forecast: `hold` will fail the same way."""
        total = 0
        for start in wanted.starts:
            try:
                total += await self._estimate_one(start, wanted)
            except (AttemptError, BadInput, DockerError):
                continue
        return total

    async def hold(self, attempt: int, wanted: ImageRequest) -> dict[str, str]:
        held = self._held[attempt] = ExitStack()
        found: dict[str, str] = {}
        try:
            for start in wanted.starts:
                found[start.key] = (await self._ensure_image(start, wanted, held)).reference
        except BaseException:  # boundary: release the images, then re-raise
            self.release(attempt)
            raise
        finally:
            self._forget_expected(wanted)
        return found

    def release(self, attempt: int, failure: AttemptFailure | None = None) -> None:
        if (held := self._held.pop(attempt, None)) is not None:
            held.close()
            self._relieve_at = 0.0

    def end_group(self, group: int) -> None:
        """Do nothing: images are held by attempt."""

    def expect(self, wanted: ImageRequest) -> None:
        if self._stopped or not wanted.starts:
            return
        one = self._expected.setdefault(wanted.id, ExpectedRequest(wanted))
        one.times += 1
        if len(self._expected) > MOST_EXPECTED:
            self._expected.popitem()

    def stop(self) -> None:
        self._stopped = True
        self._expected.clear()
        self._end_prefetches()

    # Called by the run.

    def periodic_tasks(self, leases: AttemptLeases) -> Sequence[PeriodicTask]:
        async def relieve() -> None:
            await self._find_disk()
            if (lacking := max(leases.lacking, -self._room())) > 0:
                await self._relieve(lacking)

        prefetch = partial(self._prefetch, leases)
        return (
            PeriodicTask("janitor", RELIEF_SECONDS, relieve, LONGEST_RELIEF),
            *(
                PeriodicTask("prefetch", PREFETCH_SECONDS, prefetch, LONGEST_PREFETCH)
                for _ in range(PREFETCHES)
            ),
        )

    def disk(self) -> DiskReading:
        now = self._read_disk()
        return DiskReading(path=now.path, free=now.free, total=now.total, memory=False, names=(STORE,))

    def used_bytes(self) -> int:
        now = self._read_disk()
        return max(0, now.total - now.free - self._before)

    # Opening.

    async def _open(self) -> None:
        recipe, environment = self._config.images, self._environment
        enter = self._stack.enter_async_context
        credentials = RegistryCredentials(environment.docker_config, environment.path, environment.inherited)
        registries = await enter(
            RegistryClients(credentials, recipe.registries if recipe else {}, self._note)
        )
        bases = RegistryLookup(registries, credentials)
        self._disk: DaemonDisk = await find_daemon_disk(self._client)
        warm = recipe.daemon_cache if recipe else environment.cache_size
        if warm is None:
            warm = min(WARM, self._disk.total // WARM_PART)
        state, run = find_state_directory(environment), self._config.id
        keeper = ImageKeeper(self._client, state, run, warm, self._note, self._list_expected)
        self._keeper = await enter(keeper)
        now = measure_disk(self._disk.path)
        # Bytes in use that are not the run's.
        self._before = self._keeper.record_disk_use(now.total - now.free)
        self._threads = ThreadPoolExecutor(2, "holdwater-contexts")
        self._stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        way = BuildOptions(path=environment.path, network=recipe.network if recipe else "")
        platform = recipe.platforms[0] if recipe else await self._read_platform()
        self._stock = ImageStore(self._client, bases, self._keeper, platform, way, self._room, self._logs)
        if recipe is not None:
            self._maker = await self._open_maker(recipe, registries, bases, way)

    async def _open_maker(
        self, recipe: ImageRecipe, registries: RegistryClients, bases: RegistryLookup, way: BuildOptions
    ) -> ImageMaker:
        enter, log = self._stack.enter_async_context, self._logs / "layer.log"
        blueprint = await enter(open_blueprint(recipe, registries, self._environment, log, self._note))

        async def open_assembly(part: ImageBlueprint, force: bool) -> ImageEngine:
            return await enter(RegistryEngine(part, registries, self._note, force=force))

        async def open_docker(part: ImageBlueprint, force: bool) -> ImageEngine:
            return await enter(DockerEngine(part, self._client, bases, self._keeper, self._note, way))

        needs_docker = recipe.chosen_engine is EngineKind.DOCKER
        engine = await open_engine(
            recipe, blueprint, bases, open_assembly, open_docker if needs_docker else None
        )
        return ImageMaker(recipe, blueprint, engine, bases, self._logs)

    async def _read_platform(self) -> ImagePlatform:
        told = await self._client.get("/version")
        return ImagePlatform(os=told["Os"], architecture=told["Arch"])

    # One image.

    async def _ensure_image(self, start: SandboxSpec, wanted: ImageRequest, held: ExitStack) -> DaemonImage:
        """Return the image: made by the plan, else already present, else pulled, else built."""
        try:
            if start.image is None:
                return await self._build_image(start, held)
            if self._maker is not None and start is wanted.start:
                return await self._stock.pull_image(await self._maker.ensure_image(wanted), held)
            if await self._stock.has_image(_check_reference(start.image)):
                return DaemonImage(reference=start.image)
            return await self._stock.pull_image(start.image, held)
        except ImageFailed as error:
            if start.image is None or start.build is None or error.again:
                raise
            return await self._build_image(start, held)  # a missing image can be built
        except DockerError as error:
            failure = failure_causes.daemon_error(f"`{start.key}`: {error.message}", error.hint)
            failure.after = GONE_PAUSE if isinstance(error, DaemonGone) else 0.0
            raise failure from error
        except BadInput as error:
            raise ImageFailed(error.message, error.hint, kind="name", again=False) from error

    async def _estimate_one(self, start: SandboxSpec, wanted: ImageRequest) -> int:
        if start.image is None:
            return await self._stock.measure_build(await self._read_context(start))
        reference, more = _check_reference(start.image), 0
        if self._maker is not None and start is wanted.start:
            reference, more = await self._maker.foresee_image(wanted)
        elif await self._stock.has_image(reference):
            return 0
        return more if more else await self._stock.measure_pull(reference)

    async def _build_image(self, start: SandboxSpec, held: ExitStack) -> DaemonImage:
        return await self._stock.build_image(await self._read_context(start), start.build_timeout, held)

    async def _read_context(self, start: SandboxSpec) -> DockerfileContext:
        assert start.build is not None
        loop = asyncio.get_running_loop()
        read = partial(read_context, Path(start.build), start.build_target, start.build_args)
        return await loop.run_in_executor(self._threads, read)

    # Room and prefetching.

    def _read_disk(self) -> DaemonDisk:
        """Return the current reading; while the daemon is gone, the last one."""
        try:
            self._disk = measure_disk(self._disk.path)
        except OSError:
            self._lost = True
        return self._disk

    async def _find_disk(self) -> None:
        """Find the disk again: it is read through the daemon's process, and a restart makes a new one."""
        if self._lost:
            try:
                self._disk = await find_daemon_disk(self._client)
            except (DockerError, RunStopped):
                return  # the daemon is not back yet
            self._keeper.change_disk(self._disk)
            self._lost = False

    def _room(self) -> int:
        """Return the bytes that images may still take; beyond them the run holds admission."""
        rooms = [make_disk_room(self.disk())]
        if self._config.disk is not None:
            rooms.append(make_budget_room(self._config.disk, self.used_bytes()))
        return min(room.left - math.ceil(EASE_FACTOR * room.low) for room in rooms)

    async def _relieve(self, lacking: int) -> None:
        """Make room. Attempts that wait for room come before prefetches."""
        self._end_prefetches()
        loop, wanted = asyncio.get_running_loop(), self.disk().free + lacking
        if loop.time() >= self._relieve_at:
            self._relieve_at = loop.time() + VAIN_SECONDS
            await self._keeper.evict(lambda: self.disk().free >= wanted)
            if self.disk().free >= wanted:
                self._relieve_at = 0.0

    async def _prefetch(self, leases: AttemptLeases) -> None:
        """Fetch the next expected image if there is room that no attempt waits for."""
        one = next((one for one in self._expected.values() if not one.looked), None)
        if one is None or leases.waiting:
            return
        one.looked = True
        need = await self.estimate_need(one.wanted)
        if need > self._room() or (loan := leases.lend(need)) is None:
            one.looked = False
            return
        try:
            with ExitStack() as held:
                async with asyncio.timeout(None) as scope:
                    self._prefetching.add(scope)
                    for start in one.wanted.starts:
                        one.names += (await self._ensure_image(start, one.wanted, held)).names
        except TimeoutError:
            return  # an attempt needs the room
        except AttemptError as error:
            self._note("prefetch.failed", error.message)  # the attempt reports it, if it persists
        finally:
            self._prefetching.discard(scope)
            leases.repay(loan)

    def _end_prefetches(self) -> None:
        while self._prefetching:
            self._prefetching.pop().reschedule(0)

    def _list_expected(self) -> Collection[str]:
        return {name for one in self._expected.values() for name in one.names}

    def _forget_expected(self, wanted: ImageRequest) -> None:
        if (one := self._expected.get(wanted.id)) is not None:
            one.times -= 1
            if one.times <= 0:
                del self._expected[wanted.id]


def _check_reference(reference: str) -> str:
    """Return the reference if it is a valid image name; raise otherwise."""
    parse_reference(reference)
    return reference
