"""The engine `docker`: a real build for recipes with steps, pushed, and nothing of it left on the daemon.

What one image goes through is in `making.py`. What was put on the daemon is written down and removed by
`janitor.py`, whatever happens. It waits for no room: the caller admits an image by what `foresee` says.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ...core.errors import BadInput
from ...core.image import Blueprint, Foreseen, How, Image, Made, Note, Progress, key_of
from ...docker.build import find_docker
from ...docker.client import DockerClient, DockerError
from . import causes
from .bases import Base, BaseLayer, Bases, pinned
from .janitor import Janitor
from .making import Bench, Making, Way, outcome
from .pulling import missing
from .shelter import sheltered

__all__ = ["Base", "BaseLayer", "Bases", "DockerEngine", "Way"]

CLEANING = 120.0  # seconds for the clean-up after an image


class DockerEngine:
    """Makes images with a docker daemon. The client and the janitor are opened by the caller."""

    def __init__(
        self,
        blueprint: Blueprint,
        client: DockerClient,
        bases: Bases,
        janitor: Janitor,
        note: Note,
        way: Way | None = None,
    ) -> None:
        if len(blueprint.platforms) != 1:
            told = ", ".join(f"`{platform}`" for platform in blueprint.platforms)
            raise BadInput(f"the docker engine makes images for one platform, not for: {told}")
        self._blueprint = blueprint
        self._platform = blueprint.platforms[0]
        self._client = client
        self._bases = bases
        self._janitor = janitor
        self._note = note
        self._way = way or Way()
        self._bench: Bench | None = None
        self._keys: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> DockerEngine:
        docker = await find_docker(self._client.host, self._janitor.work / "docker", self._way.path)
        if docker.refused:
            chosen, passed = docker.client, "; ".join(docker.refused)
            self._note("docker.client", f"builds go through `{chosen.path}` ({chosen.release}); not {passed}")
        self._bench = Bench(
            self._blueprint,
            self._client,
            self._bases,
            self._janitor,
            docker,
            self._way,
            self._janitor.work / "context",
        )
        with ThreadPoolExecutor(1) as thread:  # a layer is read once, which takes its time
            await asyncio.get_running_loop().run_in_executor(thread, self._bench.furnish)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bench = None  # its directory is the janitor's, and goes with the run

    async def foresee(self, image: Image) -> Foreseen:
        base = await self._bases.base(image.base, self._platform)
        key = key_of(base.digest, self._blueprint)
        found = await self._bases.found(f"{image.repository}:{key}")
        present = found is not None and found[1] == key
        if not present:
            self._janitor.expect(base.digest, base.diff_ids)
        download, unpacked = 0, 0
        if not present:
            pulled = pinned(image.base, base.digest)
            download, unpacked = await missing(self._client, self._janitor, pulled, base)
        agent = 0 if present else sum(layer.unpacked for layer in self._blueprint.layers)
        return Foreseen(
            name=image.name,
            base=image.base,
            base_digest=base.digest,
            reference=f"{image.repository}:{key}",
            how=How.PRESENT if present else How.MADE,
            upload=0 if present else sum(layer.size for layer in self._blueprint.layers),
            download=download,
            disk=download + unpacked + 2 * agent,
            replaces=found[0] if found is not None and not present else "",
        )

    async def make(self, image: Image, log: Path, progress: Progress) -> Made:
        begun = time.monotonic()
        base = await self._bases.base(image.base, self._platform)
        key = key_of(base.digest, self._blueprint)
        self._janitor.expect(base.digest, base.diff_ids)
        assert self._bench is not None, "the engine is used outside of its `async with`"
        # Two images of the same content are the same image: the second finds it made.
        async with self._keys.setdefault(key, asyncio.Lock()):
            found = await self._bases.found(f"{image.repository}:{key}")
            if found is not None and found[1] == key:
                made = outcome(image, base, key, How.PRESENT, digest=found[0])
            else:
                making = Making(self._bench, image, base, key, log, progress)
                made = await self._cleanly(making)
                made = replace(made, replaced=found[0] if found is not None else "")
        for alias in image.aliases:
            await self._bases.alias(made.reference, alias)
        return replace(made, aliases=image.aliases, seconds=time.monotonic() - begun)

    async def _cleanly(self, making: Making) -> Made:
        """Make it; whatever happens, what it took on the daemon is given back."""
        try:
            return await making.made()
        except DockerError as error:
            raise causes.of_daemon(f"`{making.image.name}`: {error.message}", error.hint) from error
        finally:
            work = self._janitor.settle(making.tags)
            await sheltered(work, CLEANING, self._note, f"after `{making.image.name}`")
