"""The images of a plan (`--images`) that a run needs: made when they are missing, each once.

How they are made is an engine's, in `image/`; that they come to the daemon is `supply.py`'s.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from hashlib import sha256
from pathlib import Path

from ..core.image import Blueprint, Engine, How, Image, Recipe
from ..core.records import Instance
from ..image import naming
from ..image.docker.bases import Bases, pinned
from ..image.docker.flights import Flights
from .wanted import Wanted

KNOWN = 4096  # images that are remembered as made; of others the registry is asked again


class Maker:
    """One run's. The engine is opened by the caller."""

    def __init__(
        self, recipe: Recipe, blueprint: Blueprint, engine: Engine, bases: Bases, logs: Path
    ) -> None:
        self._recipe = recipe
        self._blueprint = blueprint
        self._engine = engine
        self._bases = bases
        self._logs = logs
        self._slots = asyncio.Semaphore(recipe.concurrency)
        self._flights: Flights[str] = Flights()
        self._made: OrderedDict[Image, str] = OrderedDict()  # bound: KNOWN

    async def made(self, wanted: Wanted) -> str:
        """The image of this instance in its registry, by its digest."""
        image = self._image(wanted)
        if image not in self._made:
            self._made[image] = await self._flights.join(image, partial(self._make, image))
            if len(self._made) > KNOWN:
                self._made.popitem(last=False)
        self._made.move_to_end(image)
        return self._made[image]

    async def foreseen(self, wanted: Wanted) -> tuple[str, int]:
        """The same if it is there already, or nothing; and the bytes on a daemon's disk that it will take."""
        image = self._image(wanted)
        if image in self._made:
            return self._made[image], 0
        async with self._slots:
            foreseen = await self._engine.foresee(image)
        if foreseen.how is How.PRESENT:
            return foreseen.reference, 0
        base = await self._bases.base(image.base, self._recipe.platforms[0])
        agent = sum(layer.size + layer.unpacked for layer in self._blueprint.layers)
        return "", foreseen.disk + base.size + base.unpacked + agent

    async def _make(self, image: Image) -> str:
        log = self._logs / f"image-{sha256(image.name.encode()).hexdigest()[:12]}.build.log"
        async with self._slots:
            made = await self._engine.make(image, log, _Quiet())
        return pinned(made.reference, made.digest)

    def _image(self, wanted: Wanted) -> Image:
        assert wanted.start.image is not None
        instance = Instance(id=wanted.id, data=wanted.data)
        return naming.image_of(self._recipe, instance, wanted.start.image, f"instance `{wanted.id[:200]}`")


class _Quiet:
    """Nobody looks at the progress of one image of a run."""

    def phase(self, name: str) -> None:
        return

    def disk(self, bytes_: int) -> None:
        return
