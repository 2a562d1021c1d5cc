"""A build of images as a run: its layer, its engine, its disk, and the images as instances of a suite.

`image_fleet.py` runs the attempts; the engines are in `image/`. `foresee_images` only looks up and makes
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from ...core.authoring import Suite
from ...core.config import RunConfig
from ...core.errors import AttemptError, BadInput
from ...core.image import (
    EngineKind,
    FailedForecast,
    ImageBlueprint,
    ImageEngine,
    ImageForecast,
    ImageOutcome,
    ImageRecipe,
    ImageTarget,
)
from ...core.records import Instance, LimitOverrides, MiB
from ...governor.leases import AttemptLeases
from ...image import naming
from ...image.registry.client import RegistryClients
from ...image.registry.credentials import RegistryCredentials
from ...image.registry.engine import RegistryEngine
from ...image.registry.lookup import PushChecks, RegistryLookup
from ...ledger.ledger import Ledger
from ...rollout.periodic_task import PeriodicTask
from ...suite.loader import load as load_suite
from ..conductor.feed import RunFeed, SampleFeed
from ..conductor.instance_source import InstanceSource
from ..conductor.run_tasks import PendingNotes
from ..fleet.interface import Emit
from ..resources.disk_space import DiskSpace
from ..setup.config import ProcessEnvironment
from .build_daemon import BuildDaemon
from .engine_choice import open_engine
from .image_fleet import ImageFleet, image_to_instance, instance_to_image
from .image_maker import open_blueprint

MEMORY = 8 * MiB  # buffers for the data that passes through while an image is made
AT_ONCE = 16  # images looked up at once for a plan
RELIEF_SECONDS = 0.5
LONGEST_RELIEF = 600.0


class ImageBuildRun:
    """A run without agents: `run/execute.py` takes feed, fleet and periodic tasks from it."""

    def __init__(
        self, recipe: ImageRecipe, config: RunConfig, environment: ProcessEnvironment, logs: Path
    ) -> None:
        self.recipe = recipe
        self.suite = make_image_suite(recipe)
        self.blueprint = ImageBlueprint()
        self._config = config
        self._environment = environment
        self._logs = logs
        self._stack = AsyncExitStack()
        self.note = PendingNotes()  # engines and their clean-up record notes at any time
        self._ledger: Ledger | None = None  # until `feed`
        self.daemon: BuildDaemon | None = None
        self.engine: ImageEngine

    async def __aenter__(self) -> ImageBuildRun:
        environment = self._environment
        self._credentials = RegistryCredentials(
            environment.docker_config, environment.path, environment.inherited
        )
        registries = RegistryClients(self._credentials, self.recipe.registries, self.note)
        self.registries = await self._stack.enter_async_context(registries)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.aclose()
        finally:
            if self._ledger is not None:
                await self.note.write(self._ledger)

    async def set_up(self, run: str, space: DiskSpace | None = None) -> None:
        """Prepare the layer and the engine; on a daemon also sweep earlier leftovers and check free disk."""
        log = self._logs / "layer.log"
        found = open_blueprint(self.recipe, self.registries, self._environment, log, self.note)
        self.blueprint = await self._stack.enter_async_context(found)
        bases = RegistryLookup(self.registries, self._credentials)
        if self.recipe.chosen_engine is EngineKind.DOCKER:
            daemon = BuildDaemon(run, self._config, self._environment, bases, self.note)
            self.daemon = await self._stack.enter_async_context(daemon)
        open_docker = self.daemon.open_engine if self.daemon is not None else None
        self.engine = await open_engine(self.recipe, self.blueprint, bases, self._open_assembly, open_docker)
        if space is not None and self.daemon is not None:
            self.daemon.begin([one async for one in self.foresee_images()])
            space.use_store(self.daemon)

    async def _open_assembly(self, blueprint: ImageBlueprint, force: bool) -> ImageEngine:
        engine = RegistryEngine(blueprint, self.registries, self.note, force=force)
        return await self._stack.enter_async_context(engine)

    async def feed(self, ledger: Ledger, resumed: bool) -> SampleFeed:
        self._ledger = ledger
        source = ImageSource(self.suite, self._config, self.engine if self.daemon else None)
        await ledger.set_total(source.total)
        return RunFeed(self._config, ledger, source, resumed=resumed)

    def fleet(self, token: int, emit: Emit) -> ImageFleet:
        return ImageFleet(self.engine, self._logs, token, self._config.limits.acting, emit, self.daemon)

    def periodic_tasks(self, leases: AttemptLeases) -> Sequence[PeriodicTask]:
        assert self._ledger is not None, "there is no feed yet"
        daemon, notes = self.daemon, self.note.periodic_task(self._ledger)
        if daemon is None:
            return (notes,)

        async def relieve() -> None:
            if lacking := leases.lacking:
                await daemon.make_room(lacking)

        return notes, PeriodicTask("janitor", RELIEF_SECONDS, relieve, LONGEST_RELIEF)

    async def foresee_images(
        self, pushes: PushChecks | None = None
    ) -> AsyncIterator[ImageForecast | FailedForecast]:
        """Yield a forecast for each image; an image without a forecast comes with its failure.

        With `pushes`, an image whose registry refuses uploads is a failure too.
        """
        source = InstanceSource(self.suite, self._config)
        try:
            while items := await source.take(AT_ONCE):
                images = [instance_to_image(instance) for instance, _ in items]
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(_foresee_image(self.engine, image, pushes)) for image in images
                    ]
                for task in tasks:
                    yield task.result()
        finally:
            source.close()
        if source.error is not None:
            raise source.error


class ImageSource(InstanceSource):
    """Yields images as instances; with an engine, each instance requests the disk that its image needs."""

    def __init__(self, suite: Suite, config: RunConfig, engine: ImageEngine | None) -> None:
        super().__init__(suite, config)
        self._engine = engine

    async def take(self, count: int) -> list[tuple[Instance, str]]:
        items = await super().take(min(count, AT_ONCE))
        if self._engine is None:
            return items
        async with asyncio.TaskGroup() as group:
            images = [instance_to_image(instance) for instance, _ in items]
            tasks = [group.create_task(_foresee_image(self._engine, image)) for image in images]
        return [
            (_set_disk_limit(instance, task.result()), place)
            for (instance, place), task in zip(items, tasks, strict=True)
        ]


def make_image_suite(recipe: ImageRecipe) -> Suite:
    """Return the images of a recipe as a suite that yields them lazily."""
    name = Path(recipe.path).stem
    if recipe.suite is None:
        listed = [(Instance(id=name), base) for name, base in recipe.bases]

        def instances() -> Iterator[Instance]:
            for number, (instance, base) in enumerate(listed, 1):
                yield _make_instance(recipe, instance, base, f"base {number} of `{recipe.path}`")

        return Suite(name=name, instances=instances, size=len(listed))
    found = load_suite(recipe.suite)
    return Suite(name=name, instances=_adapt_instances(recipe, found), check=found.check, size=found.size)


def _adapt_instances(recipe: ImageRecipe, suite: Suite) -> Callable[[], Iterable[Instance]]:
    """Return a function that yields an image for each instance of the suite."""

    def adapt_instance(number: int, instance: Instance) -> Instance:
        place = f"instance {number} of suite `{suite.name}`"
        if not isinstance(instance, Instance):
            raise BadInput(f"{place} is of type {type(instance).__name__}: expected `Instance`")
        if suite.image is not None and recipe.template is None:
            base = suite.image(instance)
        else:
            base = naming.base_of(instance, recipe.template, place)
        return _make_instance(recipe, instance, base, place)

    async def later() -> AsyncIterator[Instance]:
        number = 0
        async for instance in suite.instances():  # type: ignore[union-attr]
            number += 1
            yield adapt_instance(number, instance)

    def now() -> Iterator[Instance]:
        for number, instance in enumerate(suite.instances(), 1):  # type: ignore[arg-type]
            yield adapt_instance(number, instance)

    def instances() -> Iterable[Instance]:
        made = suite.instances()
        return later() if hasattr(made, "__aiter__") else now()  # type: ignore[return-value]

    return instances


def _make_instance(recipe: ImageRecipe, instance: Instance, base: str, place: str) -> Instance:
    wanted = image_to_instance(naming.image_of(recipe, instance, base, place))
    return msgspec.structs.replace(wanted, limits=LimitOverrides(memory=MEMORY))


async def _foresee_image(
    engine: ImageEngine, image: ImageTarget, pushes: PushChecks | None = None
) -> ImageForecast | FailedForecast:
    try:
        found = await engine.foresee(image)
        if pushes is not None and found.how is ImageOutcome.MADE:
            await pushes.check(image.repository)
            if found.prepares:
                await pushes.check(image.bases)
        return found
    except AttemptError as error:
        return FailedForecast(name=image.name, base=image.base, failure=error.message, again=error.again)


def _set_disk_limit(instance: Instance, foreseen: ImageForecast | FailedForecast) -> Instance:
    """Request the foreseen disk. Without a forecast, request none: the attempt will meet the same failure."""
    disk = foreseen.disk if isinstance(foreseen, ImageForecast) else 0
    return msgspec.structs.replace(instance, limits=LimitOverrides(memory=MEMORY, disk=disk or None))
