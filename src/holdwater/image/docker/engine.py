"""The engine `docker`: build an image on a docker daemon, push it, and leave nothing on the daemon.

`image_build.py` has the steps of one image. `janitor.py` records everything that goes onto the daemon and
removes it after success and failure alike. The engine does not wait for disk space: the caller admits an
image by its forecast (`foresee`).
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
from ...core.image import (
    BuildProgress,
    ImageBlueprint,
    ImageForecast,
    ImageOutcome,
    ImageTarget,
    Note,
    PublishedImage,
    compute_image_key,
)
from ...docker.build import find_docker
from ...docker.client import DockerClient, DockerError
from . import failure_causes
from .bases import BaseImage, BaseLayer, BaseLookup, pin_reference
from .image_build import BuildContext, BuildOptions, ImageBuild, make_result
from .janitor import Janitor
from .pulling import measure_missing
from .uncancellable import run_uncancellable

__all__ = ["BaseImage", "BaseLayer", "BaseLookup", "BuildOptions", "DockerEngine"]

CLEANUP_SECONDS = 120.0  # time limit of the clean-up after an image


class DockerEngine:
    """Makes images with a docker daemon. The caller opens the client and the janitor."""

    def __init__(
        self,
        blueprint: ImageBlueprint,
        client: DockerClient,
        bases: BaseLookup,
        janitor: Janitor,
        note: Note,
        way: BuildOptions | None = None,
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
        self._options = way or BuildOptions()
        self._context: BuildContext | None = None
        self._keys: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> DockerEngine:
        docker = await find_docker(self._client.host, self._janitor.work / "docker", self._options.path)
        if docker.refused:
            chosen, passed = docker.client, "; ".join(docker.refused)
            self._note("docker.client", f"builds go through `{chosen.path}` ({chosen.release}); not {passed}")
        self._context = BuildContext(
            self._blueprint,
            self._client,
            self._bases,
            self._janitor,
            docker,
            self._options,
            self._janitor.work / "context",
        )
        with ThreadPoolExecutor(1) as thread:  # each layer is read once, which takes long
            await asyncio.get_running_loop().run_in_executor(thread, self._context.link_layers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context = None  # the janitor owns the context's directory and removes it with the run

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        base = await self._bases.find_base(image.base, self._platform)
        key = compute_image_key(base.digest, self._blueprint)
        found = await self._bases.find_tag(f"{image.repository}:{key}")
        present = found is not None and found[1] == key
        if not present:
            self._janitor.expect_base(base.digest, base.diff_ids)
        download, unpacked = 0, 0
        if not present:
            pulled = pin_reference(image.base, base.digest)
            download, unpacked = await measure_missing(self._client, self._janitor, pulled, base)
        agent = 0 if present else sum(layer.unpacked for layer in self._blueprint.layers)
        return ImageForecast(
            name=image.name,
            base=image.base,
            base_digest=base.digest,
            reference=f"{image.repository}:{key}",
            how=ImageOutcome.PRESENT if present else ImageOutcome.MADE,
            upload=0 if present else sum(layer.size for layer in self._blueprint.layers),
            download=download,
            disk=download + unpacked + 2 * agent,
            replaces=found[0] if found is not None and not present else "",
        )

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        begun = time.monotonic()
        base = await self._bases.find_base(image.base, self._platform)
        key = compute_image_key(base.digest, self._blueprint)
        self._janitor.expect_base(base.digest, base.diff_ids)
        assert self._context is not None, "the engine is used outside of its `async with`"
        # Two images with the same content are one image: the second request finds it in the registry.
        async with self._keys.setdefault(key, asyncio.Lock()):
            found = await self._bases.find_tag(f"{image.repository}:{key}")
            if found is not None and found[1] == key:
                made = make_result(image, base, key, ImageOutcome.PRESENT, digest=found[0])
            else:
                making = ImageBuild(self._context, image, base, key, log, progress)
                made = await self._make_cleanly(making)
                made = replace(made, replaced=found[0] if found is not None else "")
        for alias in image.aliases:
            await self._bases.alias(made.reference, alias)
        return replace(made, aliases=image.aliases, seconds=time.monotonic() - begun)

    async def _make_cleanly(self, making: ImageBuild) -> PublishedImage:
        """Run the build; remove its images from the daemon after success and failure alike."""
        try:
            return await making.run()
        except DockerError as error:
            raise failure_causes.daemon_error(
                f"`{making.image.name}`: {error.message}", error.hint
            ) from error
        finally:
            work = self._janitor.settle(making.tags)
            await run_uncancellable(work, CLEANUP_SECONDS, self._note, f"after `{making.image.name}`")
