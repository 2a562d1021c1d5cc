"""Make an image in two phases: its base with the recipe's `before` lines, published, then the agent on top.

A base is published once for its content, so a new agent runs none of these lines again. The engines of both
phases are in `docker/` and `registry/`.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from ..core.errors import ImageFailed
from ..core.image import (
    BuildProgress,
    BuildSteps,
    EngineKind,
    ImageBlueprint,
    ImageEngine,
    ImageForecast,
    ImageOutcome,
    ImageTarget,
    PublishedImage,
    compute_image_key,
)
from .docker.bases import BaseLookup, pin_reference


def split_blueprint(blueprint: ImageBlueprint) -> tuple[ImageBlueprint, ImageBlueprint]:
    """Return the blueprints of the two phases."""
    before, after = BuildSteps(before=blueprint.steps.before), BuildSteps(after=blueprint.steps.after)
    return ImageBlueprint(steps=before, platforms=blueprint.platforms), replace(blueprint, steps=after)


class PhasedEngine:
    """Implements `ImageEngine` with one engine for each phase. The caller opens them."""

    def __init__(self, bases: ImageEngine, agents: ImageEngine) -> None:
        self._bases = bases
        self._agents = agents

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        """Return the forecast of both phases; the second is not known before its base is made."""
        base = await self._bases.foresee(_make_base_target(image))
        if base.how is ImageOutcome.MADE:
            return replace(base, reference="", prepared=base.reference, prepares=True)
        found = await self._agents.foresee(replace(image, base=base.reference))
        return replace(found, base=image.base, base_digest=base.base_digest, prepared=base.reference)

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        begun = time.monotonic()
        base = await self._bases.make(_make_base_target(image), log, progress)
        prepared = pin_reference(base.reference, base.digest)
        made = await self._agents.make(replace(image, base=prepared), log, progress)
        return replace(
            made,
            base=image.base,
            base_digest=base.base_digest,
            prepared=prepared,
            uploaded=base.uploaded + made.uploaded,
            downloaded=base.downloaded + made.downloaded,
            mounted=base.mounted + made.mounted,
            seconds=time.monotonic() - begun,
        )


class PublishedImages:
    """Implements `ImageEngine` where there is no docker: finds images that are published and makes none."""

    def __init__(self, blueprint: ImageBlueprint, lookup: BaseLookup) -> None:
        self._blueprint = blueprint
        self._lookup = lookup

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        base_digest, reference, _ = await self._find_base(image)
        return ImageForecast(
            name=image.name,
            base=image.base,
            base_digest=base_digest,
            reference=reference,
            how=ImageOutcome.PRESENT,
        )

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        base_digest, reference, digest = await self._find_base(image)
        return PublishedImage(
            name=image.name,
            how=ImageOutcome.PRESENT,
            base=image.base,
            base_digest=base_digest,
            reference=reference,
            digest=digest,
            engine=EngineKind.REGISTRY,
        )

    async def _find_base(self, image: ImageTarget) -> tuple[str, str, str]:
        """Return the digest of the base, and reference and digest of that base with the `before` lines."""
        base = await self._lookup.find_base(image.base, self._blueprint.platforms[0])
        key = compute_image_key(base.digest, self._blueprint)
        reference = f"{image.repository}:{key}"
        found = await self._lookup.find_tag(reference)
        if found is None or found[1] != key:
            raise ImageFailed(
                f"`{image.name}`: `{image.base}` with the recipe's steps is not published: `{reference}`",
                "build it with docker: `holdwater images build` without `--engine registry`",
                kind="missing",
                again=False,
            )
        return base.digest, reference, found[0]


def _make_base_target(image: ImageTarget) -> ImageTarget:
    """Return the first phase of an image as an image of its own."""
    return ImageTarget(name=image.name, base=image.base, repository=image.bases)
