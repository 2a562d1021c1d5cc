"""A build of images as a run: its layer, its engine, its disk, and the images as instances of a suite.

Attempts are made in `assembly.py`; what engines do is in `image/`. `plan` looks and makes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

import msgspec

from ..core.authoring import Agent, Suite
from ..core.config import RunConfig
from ..core.errors import AttemptError, BadInput
from ..core.image import Blueprint, Engine, EngineKind, Foreseen, Image, Recipe, Unforeseen
from ..core.records import Ask, Instance, MiB
from ..image import naming
from ..image.registry.append import RegistryEngine
from ..image.registry.client import Registries
from ..image.registry.credentials import Credentials
from ..image.registry.lookup import RegistryBases
from ..ledger.ledger import Ledger
from ..rollout.duty import Duty
from ..suite.load import load as load_suite
from .assembly import ImageFleet, image_in, instance_of
from .blueprint import blueprint_of
from .config import Environment
from .daemon import Daemon
from .feed import Feed, RunFeed
from .fleet import Emit
from .governor import Governor
from .notes import Notes
from .source import Source
from .space import Space

MEMORY = 8 * MiB  # for the pieces of what passes through while an image is made
AT_ONCE = 16  # images that are looked up at once for a plan
RELIEF_SECONDS = 0.5
LONGEST_RELIEF = 600.0


class ImageWorks:
    """What a conductor is given for a build: a `run.execute.Works`."""

    def __init__(self, recipe: Recipe, config: RunConfig, environment: Environment, logs: Path) -> None:
        self.recipe = recipe
        self.suite = suite_of(recipe)
        self.blueprint = Blueprint()
        self._config = config
        self._environment = environment
        self._logs = logs
        self._stack = AsyncExitStack()
        self.note = Notes()  # engines and their clean-up say at any time what counts
        self.daemon: Daemon | None = None
        self.engine: Engine

    async def __aenter__(self) -> ImageWorks:
        environment = self._environment
        self._credentials = Credentials(environment.docker_config, environment.path, environment.inherited)
        registries = Registries(self._credentials, self.recipe.registries, self.note)
        self.registries = await self._stack.enter_async_context(registries)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._stack.aclose()
        finally:
            await self.note.write()

    async def set_up(self, run: str, space: Space | None = None) -> None:
        """The layer, the engine, and for a daemon what is left of earlier builds and what is free."""
        log = self._logs / "layer.log"
        found = blueprint_of(self.recipe, self.registries, self._environment, log)
        self.blueprint = await self._stack.enter_async_context(found)
        if self.recipe.chosen is EngineKind.REGISTRY:
            engine = RegistryEngine(self.blueprint, self.registries, self.note)
            self.engine = await self._stack.enter_async_context(engine)
            return
        bases = RegistryBases(self.registries, self._credentials)
        daemon = Daemon(run, self._config, self._environment, bases, self.note)
        self.daemon = await self._stack.enter_async_context(daemon)
        self.engine = await self.daemon.engine(self.blueprint)
        if space is not None:
            self.daemon.begin([one async for one in self.foreseen()])
            space.keep_in(self.daemon)

    async def feed(self, ledger: Ledger, resumed: bool) -> Feed:
        self.note.ledger = ledger
        source = ImageSource(self.suite, self._config, self.engine if self.daemon else None)
        await ledger.expect(source.total)
        return RunFeed(self._config, ledger, source, resumed=resumed)

    def fleet(self, token: int, emit: Emit) -> ImageFleet:
        return ImageFleet(self.engine, self._logs, token, self._config.limits.acting, emit, self.daemon)

    def duties(self, governor: Governor) -> Sequence[Duty]:
        daemon = self.daemon
        if daemon is None:
            return (self.note.duty(),)

        async def relieve() -> None:
            if lacking := governor.lacking:
                await daemon.make_room(lacking)

        return self.note.duty(), Duty("janitor", RELIEF_SECONDS, relieve, LONGEST_RELIEF)

    async def foreseen(self) -> AsyncIterator[Foreseen | Unforeseen]:
        """What would be done for each image; those of which it cannot be told come with the reason."""
        source = Source(self.suite, self._config)
        try:
            while items := await source.take(AT_ONCE):
                images = [image_in(instance) for instance, _ in items]
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(_foreseen(self.engine, image)) for image in images]
                for task in tasks:
                    yield task.result()
        finally:
            source.close()
        if source.error is not None:
            raise source.error


class ImageSource(Source):
    """Images as a run takes them: where an engine is given, each asks for the disk that it needs."""

    def __init__(self, suite: Suite, config: RunConfig, engine: Engine | None) -> None:
        super().__init__(suite, config)
        self._engine = engine

    async def take(self, count: int) -> list[tuple[Instance, str]]:
        items = await super().take(min(count, AT_ONCE))
        if self._engine is None:
            return items
        async with asyncio.TaskGroup() as group:
            images = [image_in(instance) for instance, _ in items]
            tasks = [group.create_task(_foreseen(self._engine, image)) for image in images]
        return [
            (_asking(instance, task.result()), place)
            for (instance, place), task in zip(items, tasks, strict=True)
        ]


def suite_of(recipe: Recipe) -> Suite:
    """The images of a recipe, as a suite that yields them lazily."""
    name = Path(recipe.path).stem
    if recipe.suite is None:
        listed = [(Instance(id=name), base) for name, base in recipe.bases]

        def instances() -> Iterator[Instance]:
            for number, (instance, base) in enumerate(listed, 1):
                yield _wanted(recipe, instance, base, f"base {number} of `{recipe.path}`")

        return Suite(name=name, instances=instances, size=len(listed))
    found = load_suite(recipe.suite)
    return Suite(name=name, instances=_over(recipe, found), check=found.check, size=found.size)


def _over(recipe: Recipe, suite: Suite) -> Callable[[], Iterable[Instance]]:
    """The images of a suite's instances."""

    def wanted(number: int, instance: Instance) -> Instance:
        place = f"instance {number} of suite `{suite.name}`"
        if not isinstance(instance, Instance):
            raise BadInput(f"{place} is of type {type(instance).__name__}: expected `Instance`")
        if suite.image is not None and recipe.template is None:
            base = suite.image(instance)
        else:
            base = naming.base_of(instance, recipe.template, place)
        return _wanted(recipe, instance, base, place)

    async def later() -> AsyncIterator[Instance]:
        number = 0
        async for instance in suite.instances():  # type: ignore[union-attr]
            number += 1
            yield wanted(number, instance)

    def now() -> Iterator[Instance]:
        for number, instance in enumerate(suite.instances(), 1):  # type: ignore[arg-type]
            yield wanted(number, instance)

    def instances() -> Iterable[Instance]:
        made = suite.instances()
        return later() if hasattr(made, "__aiter__") else now()  # type: ignore[return-value]

    return instances


def _wanted(recipe: Recipe, instance: Instance, base: str, place: str) -> Instance:
    wanted = instance_of(naming.image_of(recipe, instance, base, place))
    return msgspec.structs.replace(wanted, limits=Ask(memory=MEMORY))


def no_agent(kind: EngineKind) -> Agent:
    """Nobody acts in a build: the name of its engine stands where a run has its agent's."""

    def act() -> None:
        raise AssertionError("a build has no agent")

    return Agent(name=str(kind), act=act, uses_model=False)


async def _foreseen(engine: Engine, image: Image) -> Foreseen | Unforeseen:
    try:
        return await engine.foresee(image)
    except AttemptError as error:
        return Unforeseen(name=image.name, base=image.base, failure=error.message)


def _asking(instance: Instance, foreseen: Foreseen | Unforeseen) -> Instance:
    """What cannot be foreseen asks for nothing: its attempt will find out the same, and fail with it."""
    disk = foreseen.disk if isinstance(foreseen, Foreseen) else 0
    return msgspec.structs.replace(instance, limits=Ask(memory=MEMORY, disk=disk or None))
