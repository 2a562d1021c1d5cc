"""Build one image on a docker daemon: base phase, assembly, push.

The janitor records each step before it happens. `failure_causes.py` turns the daemon's errors into the
errors that the user sees.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from msgspec.structs import replace

from ...core.errors import ImageFailed
from ...core.image import (
    KEY_LABEL,
    BuildProgress,
    EngineKind,
    ImageBlueprint,
    ImageOutcome,
    ImagePlatform,
    ImageTarget,
    PublishedImage,
    make_labels,
)
from ...core.records import Record
from ...docker.build import BuildFailed, BuildRequest, DockerCommand
from ...docker.client import DaemonGone, DockerClient, DockerError
from . import failure_causes
from .bases import BaseImage, BaseLookup, pin_reference
from .cache_ownership import BuildTrace, parse_commands
from .dockerfile import RenderedDockerfile, render_assembly, render_base
from .janitor import Janitor
from .pulling import ImagePuller


class BuildOptions(Record, frozen=True):
    """Options that apply to all builds of an engine."""

    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # search path for `docker`
    network: str = ""  # network of RUN steps; empty: the daemon's default
    seconds: float = 3600.0  # time limit of one build


class BuildContext:
    """The objects and files that all images of an engine share."""

    def __init__(
        self,
        blueprint: ImageBlueprint,
        client: DockerClient,
        bases: BaseLookup,
        janitor: Janitor,
        docker: DockerCommand,
        way: BuildOptions,
        context: Path,
    ) -> None:
        self.blueprint = blueprint
        self.client = client
        self.bases = bases
        self.janitor = janitor
        self.docker = docker
        self.options = way
        self.directory = context  # holds the layers' files and nothing else
        self.files = [f"layer-{number}.tar.gz" for number in range(len(blueprint.layers))]
        self.layer_bytes: tuple[int, ...] = ()  # content size of each layer, as the daemon counts it

    @property
    def platform(self) -> ImagePlatform:
        return self.blueprint.platforms[0]

    def link_layers(self) -> None:
        """Put the layers' files into the context directory. Blocks."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name, layer in zip(self.files, self.blueprint.layers, strict=True):
            _link_file(Path(layer.path), self.directory / name)
        self.layer_bytes = tuple(_content_size(Path(layer.path)) for layer in self.blueprint.layers)


class ImageBuild:
    """The build of one image: pull the base, build the two phases, push."""

    def __init__(
        self,
        bench: BuildContext,
        image: ImageTarget,
        base: BaseImage,
        key: str,
        log: Path,
        progress: BuildProgress,
    ) -> None:
        self.image = image
        self.reference = f"{image.repository}:{key}"
        self.tags = [bench.janitor.tag(f"{key}{word}") for word in ("", "-base", "-from")]
        self._context = bench
        self._client = bench.client
        self._janitor = bench.janitor
        self._puller = ImagePuller(bench.client, bench.bases, bench.platform)
        self._blueprint = bench.blueprint
        self._base = base
        self._key = key
        self._log = log
        self._progress = progress
        self._downloaded = 0
        self._present_bytes = 0  # bytes of the base that were on the daemon before the pull
        steps, (_, built, source) = bench.blueprint.steps, self.tags
        labels = make_labels(base.digest, bench.blueprint)
        self._base_dockerfile = render_base(source, steps.before)
        self._final_dockerfile = render_assembly(
            built if steps.before else source, bench.files, bench.blueprint.edits, labels, steps.after
        )

    async def run(self) -> PublishedImage:
        final, built, source = self.tags
        pulled = pin_reference(self.image.base, self._base.digest)
        await self._refuse_foreign_tag()
        self._progress.phase("base")
        async with self._janitor.use_base(pulled, self._base.diff_ids) as absent:
            if absent:
                await self._janitor.make_room(self._base.size + self._base.unpacked)
                await self._pull(pulled)
            await self._tag(pulled, source)
            size = await self._read_size(source)
            self._janitor.record_pulled(pulled, size)
            self._present_bytes = (
                size - round(size * self._downloaded / self._base.size) if self._base.size else size
            )
            if self._blueprint.steps.before:
                await self._build_phase("base", self._base_dockerfile, built)
                await self._janitor.reset()
            self._progress.phase("assembly")
            await self._build_phase("assembly", self._final_dockerfile, final)
            self._progress.phase("push")
            return await self._push(final)

    async def _pull(self, reference: str) -> None:
        doing = f"`{self.image.name}`: base `{self.image.base}` cannot be pulled"
        self._downloaded = await self._puller.pull(reference, self._base, doing, self._progress.disk)

    async def _build_phase(self, phase: str, what: RenderedDockerfile, tag: str) -> None:
        """Build with a journaled trace, which identifies the build-cache records that the build leaves."""
        await self._janitor.untag([tag])  # moving the tag would leave the old image without a name
        way = self._context.options
        build = BuildRequest(
            dockerfile=what.text,
            tag=tag,
            context=str(self._context.directory),
            arguments=what.arguments,
            platform=str(self._context.platform),
            network=way.network,
            seconds=way.seconds,
        )
        try:
            async with self._janitor.track_build(self._make_trace):
                await self._context.docker.build(build, self._log)
        except BuildFailed as error:
            doing = f"`{self.image.name}`: {phase} on `{self.image.base}` cannot be built"
            raise failure_causes.build_error(doing, error.message, timed_out=error.timed_out) from error
        sent = sum(layer.size for layer in self._blueprint.layers)
        self._progress.disk(await self._read_size(tag) - self._present_bytes + sent)

    def _make_trace(self, now: float) -> BuildTrace:
        """Return a trace for both phases: either phase reuses and overwrites the sources of the other."""
        steps = self._blueprint.steps
        sent = [len(one.text.encode()) for one in (self._base_dockerfile, self._final_dockerfile)]
        return BuildTrace(
            begun=now,
            commands=parse_commands((*steps.before, *steps.after)),
            sizes=self._context.layer_bytes,
            sources=(*sent, sum(layer.size for layer in self._blueprint.layers)),
        )

    async def _push(self, tag: str) -> PublishedImage:
        repository = self.image.repository
        digest, mounted, sent = "", 0, set[str]()
        async with self._janitor.claim_tag(self.reference) as absent:
            if absent:  # otherwise another run has tagged the same image, and the tag stays
                self.tags.insert(0, self.reference)
                await self._tag(tag, self.reference)
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
        there = await self._context.bases.find_base(f"{repository}@{digest}", self._context.platform)
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

    async def _tag(self, source: str, target: str) -> None:
        name, _, tag = target.rpartition(":")
        await self._client.post(f"/images/{source}/tag", {"repo": name, "tag": tag})

    async def _read_size(self, reference: str) -> int:
        told = await self._client.get(f"/images/{reference}/json")
        return int(told["Size"])


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
