"""Prepares the part that all images of a recipe share: the agent's layer, packaged once, and the edits.

Used by builds of images (`build_run.py`) and by runs that make missing images (`image_maker.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from ...core.image import ImageBlueprint, ImageRecipe
from ...core.records import GiB
from ...image.layer.agent_layer import prepare_agent
from ...image.layer.cache import LayerCache
from ...image.registry.client import RegistryClients
from ...image.registry.path_extraction import extract_path
from ..setup.config import ProcessEnvironment

LAYER_CACHE = 10 * GiB


@asynccontextmanager
async def open_blueprint(
    recipe: ImageRecipe, registries: RegistryClients, environment: ProcessEnvironment, log: Path
) -> AsyncIterator[ImageBlueprint]:
    """Yield the blueprint; its layer stays on this machine in this block. `log` receives printed output."""
    edits, steps, platforms = recipe.edits, recipe.steps, recipe.platforms
    if recipe.agent is None:
        yield ImageBlueprint(edits=edits, steps=steps, platforms=platforms)
        return

    async def fetch(place: str, into: Path) -> str:
        image, _, path = place.rpartition(":")
        return await extract_path(registries, image, path, into, platforms[0])

    async with LayerCache(environment.cache / "layers", LAYER_CACHE) as cache:
        packaged = await prepare_agent(recipe.agent, cache, log, fetch)
        edits = msgspec.structs.replace(edits, env={**packaged.env, **edits.env})
        yield ImageBlueprint(layers=(packaged.layer,), edits=edits, steps=steps, platforms=platforms)
