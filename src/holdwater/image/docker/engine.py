"""The engine `docker`: build an image on a docker daemon, push it, and leave nothing on the daemon.

`janitor.py` records everything that goes onto the daemon and removes it after success and failure alike. The
engine does not wait for disk space: the caller admits an image by its forecast (`foresee`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import WeakValueDictionary

from msgspec.structs import replace

from ...core.errors import BadInput, ImageFailed
from ...core.image import (
    KEY_LABEL,
    BuildProgress,
    EngineKind,
    ImageBlueprint,
    ImageForecast,
    ImageOutcome,
    ImageTarget,
    Note,
    PublishedImage,
    compute_image_key,
    make_labels,
)
from ...core.records import Record
from ...docker.build import BuildFailed, BuildRequest, DockerCommand, find_docker
from ...docker.client import DaemonGone, DockerClient, DockerError
from ...shielded_wait import run_uncancellable
from . import failure_causes
from .bases import BaseImage, BaseLookup, ImagePuller, measure_missing, pin_reference
from .daemon import read_image_size, tag_image
from .dockerfile import RenderedDockerfile, render_assembly, render_base
from .janitor import Janitor
from .ownership import BuildTrace, parse_commands

CLEANUP_SECONDS = 120.0  # time limit of the clean-up after an image


class BuildOptions(Record, frozen=True):
    """Options that apply to all builds of an engine."""

    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # search path for `docker`
    network: str = ""  # network of RUN steps; empty: the daemon's default
    seconds: float = 3600.0  # time limit of one build
    force: bool = False  # build images that are present too, and without the daemon's build cache


class DockerEngine:
    """Makes images with a docker daemon. The caller opens the client and the janitor."""

    def __init__(
        self,
        blueprint: ImageBlueprint,
        client: DockerClient,
        bases: BaseLookup,
        janitor: Janitor,
        note: Note,
        options: BuildOptions | None = None,
    ) -> None:
        if len(blueprint.platforms) != 1:
            listed = ", ".join(f"`{platform}`" for platform in blueprint.platforms)
            raise BadInput(f"the docker engine makes images for one platform, not for: {listed}")
        self.blueprint = blueprint
        self.platform = blueprint.platforms[0]
        self.client = client
        self.bases = bases
        self.janitor = janitor
        self.options = options or BuildOptions()
        self.files = [f"layer-{number}.tar.gz" for number in range(len(blueprint.layers))]
        self.layer_bytes: tuple[int, ...] = ()  # content size of each layer, as the daemon counts it
        self._note = note
        self._docker: DockerCommand | None = None
        self._forced: set[str] = set()  # keys of images made by this engine; bound: the images of a recipe
        self._keys: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __aenter__(self) -> DockerEngine:
        docker = await find_docker(self.client.host, self.janitor.work / "docker", self.options.path)
        if docker.refused:
            chosen, passed = docker.client, "; ".join(docker.refused)
            self._note("docker.client", f"builds go through `{chosen.path}` ({chosen.release}); not {passed}")
        with ThreadPoolExecutor(1) as thread:  # each layer is read once, which takes long
            await asyncio.get_running_loop().run_in_executor(thread, self._link_layers)
        self._docker = docker
        return self

    async def __aexit__(self, *_: object) -> None:
        self._docker = None  # the janitor owns the context's directory and removes it with the run

    @property
    def context(self) -> Path:
        """The directory of all builds: it holds the layers' files and nothing else."""
        return self.janitor.work / "context"

    @property
    def docker(self) -> DockerCommand:
        assert self._docker is not None, "the engine is used outside of its `async with`"
        return self._docker

    async def foresee(self, image: ImageTarget) -> ImageForecast:
        base = await self.bases.find_base(image.base, self.platform)
        key = compute_image_key(base.digest, self.blueprint)
        found = await self.bases.find_tag(f"{image.repository}:{key}")
        present = self._is_present(found, key)
        upload, download, disk = 0, 0, 0
        if not present:
            self.janitor.expect_base(base.digest, base.diff_ids)
            pulled = pin_reference(image.base, base.digest)
            download, unpacked = await measure_missing(self.client, self.janitor, pulled, base)
            upload = sum(layer.size for layer in self.blueprint.layers)
            disk = download + unpacked + 2 * sum(layer.unpacked for layer in self.blueprint.layers)
        return ImageForecast(
            name=image.name,
            base=image.base,
            base_digest=base.digest,
            reference=f"{image.repository}:{key}",
            how=ImageOutcome.PRESENT if present else ImageOutcome.MADE,
            upload=upload,
            download=download,
            disk=disk,
            replaces=found[0] if found is not None and found[1] != key else "",
        )

    async def make(self, image: ImageTarget, log: Path, progress: BuildProgress) -> PublishedImage:
        begun = time.monotonic()
        base = await self.bases.find_base(image.base, self.platform)
        key = compute_image_key(base.digest, self.blueprint)
        self.janitor.expect_base(base.digest, base.diff_ids)
        # Two images with the same content are one image: the second request finds it in the registry.
        async with self._keys.setdefault(key, asyncio.Lock()):
            found = await self.bases.find_tag(f"{image.repository}:{key}")
            if found is not None and self._is_present(found, key):
                made = make_result(image, base, key, ImageOutcome.PRESENT, digest=found[0])
            else:
                made = await self._make_cleanly(ImageBuild(self, image, base, key, log, progress))
                self._forced.add(key)
                made = replace(made, replaced=found[0] if found is not None else "")
        for alias in image.aliases:
            await self.bases.alias(made.reference, alias)
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
            work = self.janitor.settle(making.tags)
            await run_uncancellable(work, CLEANUP_SECONDS, self._note, f"after `{making.image.name}`")

    def _is_present(self, found: tuple[str, str] | None, key: str) -> bool:
        """Return whether the tag that was found is this image, and need not be made again."""
        forced = self.options.force and key not in self._forced
        return found is not None and found[1] == key and not forced

    def _link_layers(self) -> None:
        """Put the layers' files into the context directory. Blocks."""
        self.context.mkdir(parents=True, exist_ok=True)
        for name, layer in zip(self.files, self.blueprint.layers, strict=True):
            _link_file(Path(layer.path), self.context / name)
        self.layer_bytes = tuple(_content_size(Path(layer.path)) for layer in self.blueprint.layers)


class ImageBuild:
    """The build of one image: pull the base, build the two phases, push."""

    def __init__(
        self,
        engine: DockerEngine,
        image: ImageTarget,
        base: BaseImage,
        key: str,
        log: Path,
        progress: BuildProgress,
    ) -> None:
        self.image = image
        self.reference = f"{image.repository}:{key}"
        self.tags = [engine.janitor.tag(f"{key}{word}") for word in ("", "-base", "-from")]
        self._engine = engine
        self._client = engine.client
        self._janitor = engine.janitor
        self._puller = ImagePuller(engine.client, engine.bases, engine.platform)
        self._layers = engine.blueprint.layers
        self._steps = engine.blueprint.steps
        self._base = base
        self._key = key
        self._log = log
        self._progress = progress
        self._downloaded = 0
        self._present_bytes = 0  # bytes of the base that were on the daemon before the pull
        _, built, source = self.tags
        labels = make_labels(base.digest, engine.blueprint)
        self._base_dockerfile = render_base(source, self._steps.before)
        self._final_dockerfile = render_assembly(
            built if self._steps.before else source,
            engine.files,
            engine.blueprint.edits,
            labels,
            self._steps.after,
        )

    async def run(self) -> PublishedImage:
        final, built, source = self.tags
        pulled = pin_reference(self.image.base, self._base.digest)
        await self._refuse_foreign_tag()
        self._progress.phase("base")
        async with self._janitor.use_base(pulled, self._base.diff_ids) as absent:
            if absent:
                await self._janitor.make_room(self._base.size + self._base.unpacked)
                doing = f"`{self.image.name}`: base `{self.image.base}` cannot be pulled"
                self._downloaded = await self._puller.pull(pulled, self._base, doing, self._progress.disk)
            await tag_image(self._client, pulled, source)
            size = await read_image_size(self._client, source)
            self._janitor.record_pulled(pulled, size)
            self._present_bytes = (
                size - round(size * self._downloaded / self._base.size) if self._base.size else size
            )
            if self._steps.before:
                await self._build_phase("base", self._base_dockerfile, built)
                await self._janitor.reset()
            self._progress.phase("assembly")
            await self._build_phase("assembly", self._final_dockerfile, final)
            self._progress.phase("push")
            return await self._push(final)

    async def _build_phase(self, phase: str, what: RenderedDockerfile, tag: str) -> None:
        """Build with a journaled trace, which identifies the build-cache records that the build leaves."""
        await self._janitor.untag([tag])  # moving the tag would leave the old image without a name
        build = BuildRequest(
            dockerfile=what.text,
            tag=tag,
            context=str(self._engine.context),
            arguments=what.arguments,
            platform=str(self._engine.platform),
            network=self._engine.options.network,
            seconds=self._engine.options.seconds,
            cached=not self._engine.options.force,
        )
        try:
            async with self._janitor.track_build(self._make_trace):
                await self._engine.docker.build(build, self._log)
        except BuildFailed as error:
            doing = f"`{self.image.name}`: {phase} on `{self.image.base}` cannot be built"
            raise failure_causes.build_error(doing, error.message, timed_out=error.timed_out) from error
        sent = sum(layer.size for layer in self._layers)
        self._progress.disk(await read_image_size(self._client, tag) - self._present_bytes + sent)

    def _make_trace(self, now: float) -> BuildTrace:
        """Return a trace for both phases: either phase reuses and overwrites the sources of the other."""
        sent = [len(one.text.encode()) for one in (self._base_dockerfile, self._final_dockerfile)]
        return BuildTrace(
            begun=now,
            commands=parse_commands((*self._steps.before, *self._steps.after)),
            sizes=self._engine.layer_bytes,
            sources=(*sent, sum(layer.size for layer in self._layers)),
        )

    async def _push(self, tag: str) -> PublishedImage:
        repository = self.image.repository
        digest, mounted, sent = "", 0, set[str]()
        async with self._janitor.claim_tag(self.reference) as absent:
            if absent:  # otherwise another run has tagged the same image, and the tag stays
                self.tags.insert(0, self.reference)
                await tag_image(self._client, tag, self.reference)
            doing = f"`{self.image.name}`: `{self.reference}` cannot be pushed"
            try:
                query = {"tag": self._key}
                async for told in self._client.stream(
                    f"/images/{repository}/push", query, await self._puller.auth_headers(repository)
                ):
                    digest = (told.get("aux") or {}).get("Digest") or digest
                    mounted += str(told.get("status", "")).startswith("Mounted from")
                    sent |= {told["id"]} if told.get("status") == "Pushed" else set()
            except DaemonGone:
                raise
            except DockerError as error:
                raise failure_causes.transfer_error(doing, error.message) from error
        if not digest:
            raise ImageFailed(f"{doing}: the daemon returned no digest", kind="registry")
        there = await self._engine.bases.find_base(f"{repository}@{digest}", self._engine.platform)
        return replace(
            make_result(self.image, self._base, self._key, ImageOutcome.MADE, digest=digest),
            layers=tuple(layer.digest for layer in there.layers[len(self._base.layers) :]),
            uploaded=sum(one.size for one in there.layers if one.diff_id.partition(":")[2][:12] in sent),
            downloaded=self._downloaded,
            mounted=mounted,
        )

    async def _refuse_foreign_tag(self) -> None:
        """Raise `ImageFailed` if the daemon has a different image with this tag: it must not be moved."""
        there = await self._client.get_or_none(f"/images/{self.reference}/json")
        if there is not None and (there["Config"].get("Labels") or {}).get(KEY_LABEL) != self._key:
            raise ImageFailed(
                f"`{self.image.name}`: the daemon has a different image with this name: `{self.reference}`",
                "remove it with `docker image rm` if it is not needed",
                kind="taken",
                again=False,
            )


def make_result(
    image: ImageTarget, base: BaseImage, key: str, how: ImageOutcome, *, digest: str
) -> PublishedImage:
    """Return the result with the fields that do not depend on how the image was made."""
    return PublishedImage(
        name=image.name,
        how=how,
        base=image.base,
        base_digest=base.digest,
        reference=f"{image.repository}:{key}",
        digest=digest,
        engine=EngineKind.DOCKER,
    )


def _link_file(source: Path, target: Path) -> None:
    """Put the file into the build context: as a hard link, or as a copy if the file system differs."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _content_size(path: Path) -> int:
    """Return a layer's content size as a daemon counts it: each file once, plus targets of symbolic links."""
    with tarfile.open(path) as members:
        return sum(
            len(m.linkname.encode()) if m.issym() else m.size for m in members if m.isreg() or m.issym()
        )
