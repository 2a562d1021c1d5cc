"""Choose the engine of a recipe: the registry, docker, or one for each phase. The engines are in `image/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ...core.image import ImageBlueprint, ImageEngine, ImageRecipe
from ...image.docker.bases import BaseLookup
from ...image.phased_engine import PhasedEngine, PublishedImages, split_blueprint

# (what to make, whether to make it again if it is present); the engine is open
OpenEngine = Callable[[ImageBlueprint, bool], Awaitable[ImageEngine]]


def can_assemble(recipe: ImageRecipe) -> bool:
    """Return whether a registry alone can make the images; `before` needs bases that are published."""
    return not recipe.steps.after and (not recipe.steps.before or recipe.base_repository is not None)


async def open_engine(
    recipe: ImageRecipe,
    blueprint: ImageBlueprint,
    lookup: BaseLookup,
    open_assembly: OpenEngine,
    open_docker: OpenEngine | None,
) -> ImageEngine:
    """Return the engine of a recipe; without docker, its `before` lines must be published already."""
    if recipe.base_repository is None:
        return await (open_docker or open_assembly)(blueprint, recipe.forces_agent)
    first, second = split_blueprint(blueprint)
    bases: ImageEngine = PublishedImages(first, lookup)
    if open_docker is not None:
        bases = await open_docker(first, recipe.forces_bases)
    open_agents = open_docker if second.steps and open_docker is not None else open_assembly
    return PhasedEngine(bases, await open_agents(second, recipe.forces_agent))
