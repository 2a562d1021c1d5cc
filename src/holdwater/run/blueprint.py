"""What all images of a recipe have in common: the agent's layer, packaged once, and the edits.

For a build of images (`images.py`) and for a run that makes what it misses (`maker.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from ..core.image import Blueprint, Recipe
from ..core.records import GiB
from ..image.layer.cache import LayerCache
from ..image.layer.prepare import prepare
from ..image.registry.client import Registries
from ..image.registry.pick import pick
from .config import Environment

LAYER_CACHE = 10 * GiB


@asynccontextmanager
async def blueprint_of(
    recipe: Recipe, registries: Registries, environment: Environment, log: Path
) -> AsyncIterator[Blueprint]:
    """The blueprint, whose layer stays on this machine while the block runs. `log` takes what is printed."""
    edits, steps, platforms = recipe.edits, recipe.steps, recipe.platforms
    if recipe.agent is None:
        yield Blueprint(edits=edits, steps=steps, platforms=platforms)
        return

    async def fetch(place: str, into: Path) -> str:
        image, _, path = place.rpartition(":")
        return await pick(registries, image, path, into, platforms[0])

    async with LayerCache(environment.cache / "layers", LAYER_CACHE) as cache:
        packaged = await prepare(recipe.agent, cache, log, fetch)
        edits = msgspec.structs.replace(edits, env={**packaged.env, **edits.env})
        yield Blueprint(layers=(packaged.layer,), edits=edits, steps=steps, platforms=platforms)
