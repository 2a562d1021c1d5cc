"""Provide the images for a run's sandboxes on a daemon: find, pull or build each image once.

Images stay while they are held, and are evicted when space is needed. Each image of the run has a tag of the
run beside its original name. The tag protects the image from the janitors of other runs, and identifies the
leftovers of a dead run. `run/builds/docker_supply.py` decides which image an instance gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...core.errors import ImageFailed
from ...core.failures import DISK
from ...core.image import ImagePlatform, Note
from ...core.records import MiB, Record
from ...docker.build import BuildFailed, BuildRequest, DockerCommand, find_docker
from ...docker.client import DockerClient, DockerError
from ...shielded_wait import SingleFlight
from . import failure_causes
from .bases import BaseImage, BaseKeeper, BaseLookup, ImagePuller, measure_missing, pin_reference
from .daemon import NAMESPACE, has_image, read_image_size, tag_image
from .dockerfile import DockerfileContext
from .engine import BuildOptions
from .journal import SUFFIX, BasePulled, DiskBaseline, slug
from .ownership import OwnedBase

# Shared by all runs, since the same context gives the same image. No run has this name.
BUILT_REPOSITORY = f"{NAMESPACE}/built"


class ImageKeeper(BaseKeeper):
    """A janitor that evicts the least recently used image first, and adopts an earlier conductor's images."""

    def __init__(
        self,
        client: DockerClient,
        state: Path,
        run: str,
        cache: int,
        note: Note,
        wanted_soon: Callable[[], Collection[str]],
    ) -> None:
        super().__init__(client, state, run, cache, note)
        self._spared.add(slug(run) + SUFFIX)  # a resumed run continues its own journal
        self._removal_lock = asyncio.Lock()  # no tag is set on an image during its removal
        # names of images that attempts will need soon: evicted last
        self._wanted_soon = wanted_soon

    def record_disk_use(self, used: int) -> int:
        """Return the used bytes that do not belong to this run; a resumed run already has images there."""
        if self._contents.disk_used is None:
            self._open_journal.write(DiskBaseline(used))
            return used
        mine = sum(base.size for base in self._contents.bases.values())
        return used - min(mine, max(0, used - self._contents.disk_used))

    @contextmanager
    def hold_images(self, *names: str) -> Iterator[None]:
        """Protect the images with these names from eviction; record the end as their last use."""
        try:
            with super().hold_images(*names):
                yield
        finally:
            for name in names:
                if (base := self._contents.bases.get(name)) is not None:
                    self._contents.bases[name] = replace(base, used=time.time())

    async def try_tag(self, source: str, tag: str) -> bool:
        """Give the image `source` this tag of the run; return whether the image exists."""
        async with self._removal_lock:
            self.claim_name(tag)
            try:
                await tag_image(self._client, source, tag)
            except DockerError as error:
                if error.status != 404:
                    raise
                return await has_image(self._client, tag)
        return True

    def claim_name(self, name: str) -> None:
        """Record an image name as owned; the name must be absent from the daemon, or be a tag of the run."""
        if name not in self._contents.bases:
            self._open_journal.write(BasePulled(OwnedBase(reference=name, used=time.time())))

    async def settle(self, tags: Sequence[str] = ()) -> None:
        """Clean up after an image of the plan; bases stay until space is needed."""
        await self.untag(tags)
        await self.reset()

    async def make_room(self, wanted: int) -> int:
        await self.evict(lambda: (self.free_bytes() or wanted) >= wanted)
        return self.free_bytes() or 0

    async def evict(self, enough: Callable[[], bool]) -> None:
        """Remove idle images of the run, least recently used first, until `enough` returns true."""
        if not enough():
            await self._run_locked("images", partial(self._evict, enough))

    async def _evict(self, enough: Callable[[], bool]) -> None:
        soon, bases = self._wanted_soon(), self._contents.bases
        for name in sorted(bases, key=lambda one: (one in soon, bases[one].used, one)):
            if enough():
                return
            async with self._removal_lock:
                if not self._busy[name]:
                    await self._remove(name)
        await self._drop_names()
        await self._trim(sources=True)


class DaemonImage(Record, frozen=True):
    """An image on the daemon."""

    reference: str  # the name to create containers from
    names: tuple[str, ...] = ()  # all names that holdwater gave it; none: a foreign image


class ImageStore:
    """The images of one run. `room` returns how many more bytes the images may take."""

    def __init__(
        self,
        client: DockerClient,
        bases: BaseLookup,
        keeper: ImageKeeper,
        platform: ImagePlatform,
        way: BuildOptions,
        room: Callable[[], int],
        logs: Path,
    ) -> None:
        self._client = client
        self._bases = bases
        self._keeper = keeper
        self._platform = platform
        self._options = way
        self._room = room
        self._logs = logs
        self._puller = ImagePuller(client, bases, platform)
        self._flights: SingleFlight[None] = SingleFlight()
        self._docker_search: SingleFlight[DockerCommand] = SingleFlight()
        self._docker: DockerCommand | None = None
        self._largest = 0  # bytes of the largest image built so far

    async def has_image(self, reference: str) -> bool:
        """Return whether the daemon has an image with this name, owned or foreign."""
        return await has_image(self._client, reference)

    async def measure_pull(self, reference: str) -> int:
        """Return the bytes that a pull would take on the disk."""
        base = await self._bases.find_base(reference, self._platform)
        source = pin_reference(reference, base.digest)
        if source in self._flights or await self.has_image(self._tag(source)):
            return 0  # present, or leased by the request that pulls it
        return sum(await measure_missing(self._client, self._keeper, source, base))

    async def measure_build(self, context: DockerfileContext) -> int:
        """Return an estimate of the bytes that a build would take on the disk."""
        source = _built_name(context)
        if source in self._flights or await self.has_image(self._tag(source)) or await self.has_image(source):
            return 0
        return max(context.size, self._largest)

    async def pull_image(self, reference: str, held: ExitStack) -> DaemonImage:
        """Pull the image if it is absent, and keep it until `held` is closed."""
        base = await self._bases.find_base(reference, self._platform)
        source = pin_reference(reference, base.digest)
        return await self._hold_image(source, held, partial(self._pull, reference, source, base))

    async def build_image(self, context: DockerfileContext, seconds: float, held: ExitStack) -> DaemonImage:
        """Build the image if it is absent, and keep it until `held` is closed."""
        return await self._hold_image(_built_name(context), held, partial(self._build, context, seconds))

    async def _hold_image(
        self, source: str, held: ExitStack, bring: Callable[[], Coroutine[Any, Any, None]]
    ) -> DaemonImage:
        tag = self._tag(source)
        held.enter_context(self._keeper.hold_images(source, tag))
        await self._flights.join(source, partial(self._ensure_tagged, source, tag, bring))
        return DaemonImage(reference=tag, names=(source, tag))

    async def _ensure_tagged(
        self, source: str, tag: str, bring: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        if await self._keeper.try_tag(source, tag):
            return
        await bring()
        if not await self._keeper.try_tag(source, tag):
            raise ImageFailed(
                f"`{source}`: the image was removed right after it was pulled or built", kind="gone"
            )

    def _tag(self, source: str) -> str:
        return self._keeper.tag(sha256(source.encode()).hexdigest()[:32])

    async def _pull(self, reference: str, source: str, base: BaseImage) -> None:
        await self._make_room(reference, sum(await measure_missing(self._client, self._keeper, source, base)))
        async with self._keeper.use_base(source, base.diff_ids) as absent:
            if absent:
                await self._puller.pull(source, base, f"`{reference}` cannot be pulled")
            self._keeper.record_pulled(source, await read_image_size(self._client, source))

    async def _build(self, context: DockerfileContext, seconds: float) -> None:
        source = _built_name(context)
        await self._make_room(context.directory, max(context.size, self._largest))
        docker = await self._find_docker()
        self._keeper.claim_name(source)
        build = BuildRequest(
            dockerfile=context.dockerfile,
            tag=source,
            context=context.directory,
            arguments=context.arguments,
            platform=str(self._platform),
            network=self._options.network,
            seconds=seconds,
        )
        log = self._logs / name_build_log(context.digest)
        try:
            async with self._keeper.track_build(lambda now: replace(context.trace, begun=now)):
                await docker.build(build, log)
        except BuildFailed as error:
            raise _build_error(context, error, log) from error
        size = await read_image_size(self._client, source)
        self._largest = max(self._largest, size)
        self._keeper.record_pulled(source, size)
        await self._keeper.reset()

    async def _make_room(self, name: str, need: int) -> None:
        await self._keeper.evict(lambda: self._room() >= need)
        if (room := self._room()) < need:
            figures = f"{need / MiB:,.1f} MiB are needed, {max(0, room) / MiB:,.1f} MiB are left"
            raise ImageFailed(
                f"`{name}`: there is no room for it on the docker daemon's disk: {figures}",
                "give the run more with `--disk`, or make room there",
                kind=DISK,
            )

    async def _find_docker(self) -> DockerCommand:
        """Return the docker command; the search runs at the first build."""
        if self._docker is None:
            home = self._keeper.work / "docker"
            look = partial(find_docker, self._client.host, home, self._options.path)
            self._docker = await self._docker_search.join("docker", look)
        return self._docker


def name_build_log(digest: str) -> str:
    """Return the name of the file in a run's logs that has the output of a context's build."""
    return f"image-{digest[:12]}.build.log"


def _built_name(context: DockerfileContext) -> str:
    return f"{BUILT_REPOSITORY}:{context.digest}"


def _build_error(context: DockerfileContext, error: BuildFailed, log: Path) -> Exception:
    """Return the error of a failed build; a failed step may be retried, as its network may work again."""
    doing = f"`{context.directory}`: its image cannot be built"
    found = failure_causes.build_error(doing, error.message, timed_out=error.timed_out)
    if found.kind == "build":
        return ImageFailed(
            found.message, f"see the whole output in `{log.name}` of the run's logs", kind="build"
        )
    return found
