"""Images in a run: whatever an attempt's sandboxes start from is on the daemon before it starts, and stays.

What is missing is made by the plan (`maker.py`), pulled or built (`image/docker/stock.py`), what comes next
is prefetched, and what is idle and ours goes when room is wanted. It waits for nothing but pulls and builds:
an attempt asks for its `need` first, and the governor leases that.
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

from ..core.config import RunConfig
from ..core.errors import AttemptError, BadInput, ImageFailed, RunStopped
from ..core.image import EngineKind, Note, Platform, Recipe
from ..core.records import Failure, GiB, Start
from ..docker.client import DaemonGone, DockerClient, DockerError
from ..governor.reading import Disk
from ..governor.room import EASE, room_in, room_of
from ..image.docker import causes
from ..image.docker.context import Context, read
from ..image.docker.disk import DaemonDisk, daemon_disk, reread
from ..image.docker.engine import DockerEngine
from ..image.docker.keeper import Keeper
from ..image.docker.making import Way
from ..image.docker.stock import Copy, Stock
from ..image.registry.append import RegistryEngine
from ..image.registry.client import Registries
from ..image.registry.credentials import Credentials
from ..image.registry.lookup import RegistryBases
from ..image.registry.reference import parse
from ..rollout.duty import Duty
from .blueprint import blueprint_of
from .config import Environment
from .daemon import STORE, state_of
from .governor import Governor
from .maker import Maker
from .wanted import Wanted

PREFETCHES = 2  # at once
PREFETCH_SECONDS = 0.2
LONGEST_PREFETCH = 3600.0
RELIEF_SECONDS = 0.2
LONGEST_RELIEF = 600.0
VAIN_SECONDS = 2.0  # before room is looked for again where there was none, unless something is released
GONE_PAUSE = 5.0  # seconds before an attempt is tried again whose daemon did not answer
MOST_EXPECTED = 1024
WARM = 10 * GiB  # that stay on the daemon after a run without a recipe, at most ...
WARM_PART = 20  # ... and of its disk no more than this part


class Expected(msgspec.Struct):
    """What will be wanted soon."""

    wanted: Wanted
    times: int = 0
    looked: bool = False  # it was prefetched, or need not be
    names: tuple[str, ...] = ()  # of what is there for it


class Supply:
    """One run's; opened with `async with`. A `wanted.Supplies`, and a `space.Store` once it is open."""

    def __init__(
        self, config: RunConfig, environment: Environment, client: DockerClient, note: Note, logs: Path
    ) -> None:
        self._config = config
        self._environment = environment
        self._client = client
        self._note = note
        self._logs = logs
        self._stack = AsyncExitStack()
        self._maker: Maker | None = None
        self._held: dict[int, ExitStack] = {}  # bound: the run's concurrency
        self._expected: OrderedDict[str, Expected] = OrderedDict()  # bound: MOST_EXPECTED
        self._prefetching: set[asyncio.Timeout] = set()  # bound: PREFETCHES
        self._stopped = False
        self._lost = False  # the daemon's disk cannot be seen any more
        self._relieve_at = 0.0  # when room is looked for again

    async def __aenter__(self) -> Supply:
        try:
            await self._open()
        except BaseException:  # boundary: given back, then raised again
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

    # What the scheduler asks for.

    async def need(self, wanted: Wanted) -> int:
        """What cannot be foreseen asks for nothing: `hold` will find out the same, and fail with it."""
        total = 0
        for start in wanted.starts:
            try:
                total += await self._need(start, wanted)
            except (AttemptError, BadInput, DockerError):
                continue
        return total

    async def hold(self, attempt: int, wanted: Wanted) -> dict[str, str]:
        held = self._held[attempt] = ExitStack()
        found: dict[str, str] = {}
        try:
            for start in wanted.starts:
                found[start.key] = (await self._had(start, wanted, held)).reference
        except BaseException:  # boundary: given back, then raised again
            self.release(attempt)
            raise
        finally:
            self._no_longer_expected(wanted)
        return found

    def release(self, attempt: int, failure: Failure | None = None) -> None:
        if (held := self._held.pop(attempt, None)) is not None:
            held.close()
            self._relieve_at = 0.0

    def expect(self, wanted: Wanted) -> None:
        if self._stopped or not wanted.starts:
            return
        one = self._expected.setdefault(wanted.id, Expected(wanted))
        one.times += 1
        if len(self._expected) > MOST_EXPECTED:
            self._expected.popitem()

    def stop(self) -> None:
        self._stopped = True
        self._expected.clear()
        self._end_prefetches()

    # What the run asks for.

    def duties(self, governor: Governor) -> Sequence[Duty]:
        async def relieve() -> None:
            await self._find_disk()
            if (lacking := max(governor.lacking, -self._room())) > 0:
                await self._relieve(lacking)

        prefetch = partial(self._prefetch, governor)
        return (
            Duty("janitor", RELIEF_SECONDS, relieve, LONGEST_RELIEF),
            *(Duty("prefetch", PREFETCH_SECONDS, prefetch, LONGEST_PREFETCH) for _ in range(PREFETCHES)),
        )

    def disk(self) -> Disk:
        now = self._read_disk()
        return Disk(path=now.path, free=now.free, total=now.total, memory=False, names=(STORE,))

    def used(self) -> int:
        now = self._read_disk()
        return max(0, now.total - now.free - self._before)

    # Opening.

    async def _open(self) -> None:
        recipe, environment = self._config.images, self._environment
        enter = self._stack.enter_async_context
        credentials = Credentials(environment.docker_config, environment.path, environment.inherited)
        registries = await enter(Registries(credentials, recipe.registries if recipe else {}, self._note))
        bases = RegistryBases(registries, credentials)
        self._disk: DaemonDisk = await daemon_disk(self._client)
        warm = recipe.cache if recipe else min(WARM, self._disk.total // WARM_PART)
        keeper = Keeper(self._client, state_of(environment), self._config.id, warm, self._note)
        self._keeper = await enter(keeper)
        self._keeper.soon = self._soon
        now = reread(self._disk.path)
        self._before = self._keeper.began(now.total - now.free)  # bytes that are not the run's
        self._threads = ThreadPoolExecutor(2, "holdwater-contexts")
        self._stack.callback(self._threads.shutdown, wait=False, cancel_futures=True)
        way = Way(path=environment.path, network=recipe.network if recipe else "")
        platform = recipe.platforms[0] if recipe else await self._platform()
        self._stock = Stock(self._client, bases, self._keeper, platform, way, self._room, self._logs)
        if recipe is not None:
            self._maker = await self._opened_maker(recipe, registries, bases, way)

    async def _opened_maker(
        self, recipe: Recipe, registries: Registries, bases: RegistryBases, way: Way
    ) -> Maker:
        enter, log = self._stack.enter_async_context, self._logs / "layer.log"
        blueprint = await enter(blueprint_of(recipe, registries, self._environment, log))
        engine: RegistryEngine | DockerEngine
        if recipe.chosen is EngineKind.REGISTRY:
            engine = await enter(RegistryEngine(blueprint, registries, self._note))
        else:
            docker = DockerEngine(blueprint, self._client, bases, self._keeper, self._note, way)
            engine = await enter(docker)
        return Maker(recipe, blueprint, engine, bases, self._logs)

    async def _platform(self) -> Platform:
        told = await self._client.get("/version")
        return Platform(os=told["Os"], architecture=told["Arch"])

    # One image.

    async def _had(self, start: Start, wanted: Wanted, held: ExitStack) -> Copy:
        """By the plan, else as it is here, else pulled, else built."""
        try:
            if start.image is None:
                return await self._built(start, held)
            if self._maker is not None and start is wanted.start:
                return await self._stock.pulled(await self._maker.made(wanted), held)
            if await self._stock.local(_checked(start.image)):
                return Copy(reference=start.image)
            return await self._stock.pulled(start.image, held)
        except ImageFailed as error:
            if start.image is None or start.build is None or error.again:
                raise
            return await self._built(start, held)  # where it does not exist, it can be built
        except DockerError as error:
            failure = causes.of_daemon(f"`{start.key}`: {error.message}", error.hint)
            failure.after = GONE_PAUSE if isinstance(error, DaemonGone) else 0.0
            raise failure from error
        except BadInput as error:
            raise ImageFailed(error.message, error.hint, kind="name", again=False) from error

    async def _need(self, start: Start, wanted: Wanted) -> int:
        if start.image is None:
            return await self._stock.lacks_built(await self._context(start))
        reference, more = _checked(start.image), 0
        if self._maker is not None and start is wanted.start:
            reference, more = await self._maker.foreseen(wanted)
        elif await self._stock.local(reference):
            return 0
        return more if more else await self._stock.lacks(reference)

    async def _built(self, start: Start, held: ExitStack) -> Copy:
        return await self._stock.built(await self._context(start), start.build_timeout, held)

    async def _context(self, start: Start) -> Context:
        assert start.build is not None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, read, Path(start.build))

    # Room, and what comes next.

    def _read_disk(self) -> DaemonDisk:
        """As it is now; while the daemon is gone, as it was last."""
        try:
            self._disk = reread(self._disk.path)
        except OSError:
            self._lost = True
        return self._disk

    async def _find_disk(self) -> None:
        """A daemon that was started again is another process, through which its disk is seen."""
        if self._lost:
            try:
                self._keeper.disk = self._disk = await daemon_disk(self._client)
            except (DockerError, RunStopped):
                return  # it is not back yet
            self._lost = False

    def _room(self) -> int:
        """Bytes that images may still take: beyond them a run counts as short of disk, and admits nobody."""
        rooms = [room_of(self.disk())]
        if self._config.disk is not None:
            rooms.append(room_in(self._config.disk, self.used()))
        return min(room.left - math.ceil(EASE * room.low) for room in rooms)

    async def _relieve(self, lacking: int) -> None:
        """Attempts that wait for room come before what is only expected."""
        self._end_prefetches()
        loop, wanted = asyncio.get_running_loop(), self.disk().free + lacking
        if loop.time() >= self._relieve_at:
            self._relieve_at = loop.time() + VAIN_SECONDS
            await self._keeper.evict(lambda: self.disk().free >= wanted)
            if self.disk().free >= wanted:
                self._relieve_at = 0.0

    async def _prefetch(self, governor: Governor) -> None:
        """Bring the next image that will be wanted, if there is room for it that nobody waits for."""
        one = next((one for one in self._expected.values() if not one.looked), None)
        if one is None or governor.waiting:
            return
        one.looked = True
        need = await self.need(one.wanted)
        if need > self._room() or (loan := governor.lend(need)) is None:
            one.looked = False
            return
        try:
            with ExitStack() as held:
                async with asyncio.timeout(None) as scope:
                    self._prefetching.add(scope)
                    for start in one.wanted.starts:
                        one.names += (await self._had(start, one.wanted, held)).names
        except TimeoutError:
            return  # somebody needs the room
        except AttemptError as error:
            self._note("prefetch.failed", error.message)  # the attempt will say the same, or not
        finally:
            self._prefetching.discard(scope)
            governor.repay(loan)

    def _end_prefetches(self) -> None:
        while self._prefetching:
            self._prefetching.pop().reschedule(0)

    def _soon(self) -> Collection[str]:
        return {name for one in self._expected.values() for name in one.names}

    def _no_longer_expected(self, wanted: Wanted) -> None:
        if (one := self._expected.get(wanted.id)) is not None:
            one.times -= 1
            if one.times <= 0:
                del self._expected[wanted.id]


def _checked(reference: str) -> str:
    """The same, if it can be the name of an image."""
    parse(reference)
    return reference
