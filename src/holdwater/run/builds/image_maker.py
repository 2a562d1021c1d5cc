"""Makes the missing images of a plan (`--images`) that a run needs, each once, from a blueprint.

A blueprint is the part that all images of a recipe share; builds (`build_run.py`) use it too. The engines in
`image/` make the images; `docker_supply.py` brings them to the daemon.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from ...core.image import (
    AgentSource,
    ImageBlueprint,
    ImageEngine,
    ImageOutcome,
    ImageRecipe,
    ImageTarget,
    Note,
)
from ...core.records import Instance
from ...image import naming
from ...image.docker.bases import BaseLookup, pin_reference
from ...image.layer.agent_layer import prepare_agent
from ...image.layer.cache import LayerCache
from ...image.phased_engine import PublishedImages
from ...image.registry.client import RegistryClients
from ...image.registry.credentials import RegistryCredentials
from ...image.registry.engine import RegistryEngine
from ...image.registry.lookup import RegistryLookup
from ...image.registry.path_extraction import extract_path
from ...shielded_wait import SingleFlight
from ..conductor.admission import ImageRequest
from ..setup.config import ProcessEnvironment
from .engine_choice import can_assemble, open_engine
from .stage_files import StageBuild

KNOWN = 4096  # images remembered as made; for others the registry is queried again


@asynccontextmanager
async def open_blueprint(
    recipe: ImageRecipe, registries: RegistryClients, environment: ProcessEnvironment, log: Path, note: Note
) -> AsyncIterator[ImageBlueprint]:
    """Yield the blueprint; its layer stays on this machine in this block. `log` receives printed output."""
    edits, steps, platforms = recipe.edits, recipe.steps, recipe.platforms
    if recipe.agent is None:
        yield ImageBlueprint(edits=edits, steps=steps, platforms=platforms)
        return

    async def fetch(source: AgentSource, into: Path) -> str:
        if source.stage is not None:
            await StageBuild(source.stage, recipe, environment, note).build_files(into, log)
            return ""
        image, _, path = (source.image or "").rpartition(":")
        return await extract_path(registries, image, path, into, platforms[0])

    directory, rebuild = environment.cache / "layers", recipe.forces_agent
    async with LayerCache(directory, recipe.layer_cache, note, rebuild=rebuild) as cache:
        packaged = await prepare_agent(recipe.agent, cache, log, fetch)
        edits = msgspec.structs.replace(edits, env={**packaged.env, **edits.env})
        yield ImageBlueprint(layers=(packaged.layer,), edits=edits, steps=steps, platforms=platforms)


@asynccontextmanager
async def open_registry_maker(
    recipe: ImageRecipe, environment: ProcessEnvironment, logs: Path, note: Note
) -> AsyncIterator[ImageMaker]:
    """Yield a maker without docker: the registry puts images together, or has those that need more."""
    credentials = RegistryCredentials(environment.docker_config, environment.path, environment.inherited)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        registries = await enter(RegistryClients(credentials, recipe.registries, note))
        lookup = RegistryLookup(registries, credentials)
        blueprint = await enter(open_blueprint(recipe, registries, environment, logs / "layer.log", note))

        async def open_assembly(part: ImageBlueprint, force: bool) -> ImageEngine:
            return await enter(RegistryEngine(part, registries, note, force=force))

        async def open_published(part: ImageBlueprint, force: bool) -> ImageEngine:
            return PublishedImages(part, lookup)

        open_steps = None if can_assemble(recipe) else open_published
        engine = await open_engine(recipe, blueprint, lookup, open_assembly, open_steps)
        yield ImageMaker(recipe, blueprint, engine, lookup, logs)


class ImageMaker:
    """Makes the images of one run. The caller opens the engine."""

    def __init__(
        self,
        recipe: ImageRecipe,
        blueprint: ImageBlueprint,
        engine: ImageEngine,
        bases: BaseLookup,
        logs: Path,
    ) -> None:
        self._recipe = recipe
        self._blueprint = blueprint
        self._engine = engine
        self._bases = bases
        self._logs = logs
        self._slots = asyncio.Semaphore(recipe.concurrency)
        self._flights: SingleFlight[str] = SingleFlight()
        self._made: OrderedDict[ImageTarget, str] = OrderedDict()  # bound: KNOWN

    async def ensure_image(self, wanted: ImageRequest) -> str:
        """Make the instance's image if it is missing; return its registry reference, pinned by digest."""
        image = self._describe_image(wanted)
        if image not in self._made:
            self._made[image] = await self._flights.join(image, partial(self._make, image))
            if len(self._made) > KNOWN:
                self._made.popitem(last=False)
        self._made.move_to_end(image)
        return self._made[image]

    async def foresee_image(self, wanted: ImageRequest) -> tuple[str, int]:
        """Return the image's reference (empty: it must be made) and the bytes it needs on a daemon's disk."""
        image = self._describe_image(wanted)
        if image in self._made:
            return self._made[image], 0
        async with self._slots:
            foreseen = await self._engine.foresee(image)
        if foreseen.how is ImageOutcome.PRESENT:
            return foreseen.reference, 0
        base = await self._bases.find_base(image.base, self._recipe.platforms[0])
        agent = sum(layer.size + layer.unpacked for layer in self._blueprint.layers)
        return "", foreseen.disk + base.size + base.unpacked + agent

    async def _make(self, image: ImageTarget) -> str:
        log = self._logs / f"image-{sha256(image.name.encode()).hexdigest()[:12]}.build.log"
        async with self._slots:
            made = await self._engine.make(image, log, _SilentProgress())
        return pin_reference(made.reference, made.digest)

    def _describe_image(self, wanted: ImageRequest) -> ImageTarget:
        assert wanted.start.image is not None
        instance = Instance(id=wanted.id, data=wanted.data)
        return naming.image_of(self._recipe, instance, wanted.start.image, f"instance `{wanted.id[:200]}`")


class _SilentProgress:
    """Discards progress: a run does not show the progress of a single image."""

    def phase(self, name: str) -> None:
        return

    def disk(self, bytes_: int) -> None:
        return
