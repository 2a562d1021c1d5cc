"""One image on its way through a docker daemon: base phase, assembly, push.

Each step is told to the janitor before it is taken, and every refusal to the user in `causes.py`'s terms.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from msgspec.structs import replace

from ...core.errors import ImageFailed
from ...core.image import KEY_LABEL, Blueprint, EngineKind, How, Image, Made, Platform, Progress, labels_of
from ...core.records import Record
from ...docker.build import Build, BuildFailed, Docker
from ...docker.client import DaemonGone, DockerClient, DockerError
from . import causes
from .bases import Base, Bases, pinned
from .dockerfile import Dockerfile, assembly, base_phase
from .janitor import Janitor
from .pulling import Puller
from .traces import Trace, commands_of


class Way(Record, frozen=True):
    """How builds are carried out."""

    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where `docker` is looked for
    network: str = ""  # of RUN steps; empty: the daemon's own
    seconds: float = 3600.0  # for one build


class Bench:
    """What all images of a build are made with."""

    def __init__(
        self,
        blueprint: Blueprint,
        client: DockerClient,
        bases: Bases,
        janitor: Janitor,
        docker: Docker,
        way: Way,
        context: Path,
    ) -> None:
        self.blueprint = blueprint
        self.client = client
        self.bases = bases
        self.janitor = janitor
        self.docker = docker
        self.way = way
        self.context = context  # the layers' files and nothing else
        self.files = [f"layer-{number}.tar.gz" for number in range(len(blueprint.layers))]
        self.added: tuple[int, ...] = ()  # bytes of each layer's files, as the daemon counts them

    @property
    def platform(self) -> Platform:
        return self.blueprint.platforms[0]

    def furnish(self) -> None:
        """Put the layers into the context."""
        self.context.mkdir(parents=True, exist_ok=True)
        for name, layer in zip(self.files, self.blueprint.layers, strict=True):
            _linked(Path(layer.path), self.context / name)
        self.added = tuple(_content(Path(layer.path)) for layer in self.blueprint.layers)


class Making:
    """One image on its way."""

    def __init__(
        self, bench: Bench, image: Image, base: Base, key: str, log: Path, progress: Progress
    ) -> None:
        self.image = image
        self.reference = f"{image.repository}:{key}"
        self.tags = [bench.janitor.tag(f"{key}{word}") for word in ("", "-base", "-from")]
        self._bench = bench
        self._client = bench.client
        self._janitor = bench.janitor
        self._puller = Puller(bench.client, bench.bases, bench.platform)
        self._blueprint = bench.blueprint
        self._base = base
        self._key = key
        self._log = log
        self._progress = progress
        self._downloaded = 0
        self._others = 0  # bytes of the base that were on the daemon before
        steps, (_, built, source) = bench.blueprint.steps, self.tags
        labels = labels_of(base.digest, bench.blueprint)
        self._first = base_phase(source, steps.before)
        self._second = assembly(
            built if steps.before else source, bench.files, bench.blueprint.edits, labels, steps.after
        )

    async def made(self) -> Made:
        final, built, source = self.tags
        pulled = pinned(self.image.base, self._base.digest)
        await self._refuse_a_name_of_others()
        self._progress.phase("base")
        async with self._janitor.using(pulled, self._base.diff_ids) as absent:
            if absent:
                await self._janitor.make_room(self._base.size + self._base.unpacked)
                await self._pull(pulled)
            await self._tagged(pulled, source)
            size = await self._size(source)
            self._janitor.pulled(pulled, size)
            self._others = (
                size - round(size * self._downloaded / self._base.size) if self._base.size else size
            )
            if self._blueprint.steps.before:
                await self._built("base", self._first, built)
                await self._janitor.reset()
            self._progress.phase("assembly")
            await self._built("assembly", self._second, final)
            self._progress.phase("push")
            return await self._pushed(final)

    async def _pull(self, reference: str) -> None:
        doing = f"`{self.image.name}`: base `{self.image.base}` cannot be pulled"
        self._downloaded = await self._puller.pull(reference, self._base, doing, self._progress.disk)

    async def _built(self, phase: str, what: Dockerfile, tag: str) -> None:
        """Build under a trace, so that what it leaves can be told by it."""
        await self._janitor.untag([tag])  # a tag that moved away would leave an image without a name
        way = self._bench.way
        build = Build(
            dockerfile=what.text,
            tag=tag,
            context=str(self._bench.context),
            arguments=what.arguments,
            platform=str(self._bench.platform),
            network=way.network,
            seconds=way.seconds,
        )
        try:
            async with self._janitor.building(self._trace):
                await self._bench.docker.build(build, self._log)
        except BuildFailed as error:
            doing = f"`{self.image.name}`: {phase} on `{self.image.base}` cannot be built"
            raise causes.of_build(doing, error.message, timed_out=error.timed_out) from error
        sent = sum(layer.size for layer in self._blueprint.layers)
        self._progress.disk(await self._size(tag) - self._others + sent)

    def _trace(self, now: float) -> Trace:
        """Of either phase: what one of them was sent, the other's finds and writes over."""
        steps = self._blueprint.steps
        sent = [len(one.text.encode()) for one in (self._first, self._second)]
        return Trace(
            begun=now,
            commands=commands_of((*steps.before, *steps.after)),
            sizes=self._bench.added,
            sources=(*sent, sum(layer.size for layer in self._blueprint.layers)),
        )

    async def _pushed(self, tag: str) -> Made:
        repository = self.image.repository
        digest, mounted, sent = "", 0, set[str]()
        async with self._janitor.naming(self.reference) as absent:
            if absent:  # or else another run has put the same there: it keeps its name
                self.tags.insert(0, self.reference)
                await self._tagged(tag, self.reference)
            doing = f"`{self.image.name}`: `{self.reference}` cannot be pushed"
            try:
                query = {"tag": self._key}
                async for told in self._client.stream(
                    f"/images/{repository}/push", query, await self._puller.auth(repository)
                ):
                    digest = (told.get("aux") or {}).get("Digest") or digest
                    mounted += str(told.get("status", "")).startswith("Mounted from")
                    sent |= {told["id"]} if told.get("status") == "Pushed" else set()
            except DaemonGone:
                raise
            except DockerError as error:
                raise causes.of_transfer(doing, error.message) from error
        if not digest:
            raise ImageFailed(f"{doing}: the daemon tells no digest", kind="registry")
        there = await self._bench.bases.base(f"{repository}@{digest}", self._bench.platform)
        return replace(
            outcome(self.image, self._base, self._key, How.MADE, digest=digest),
            layers=tuple(layer.digest for layer in there.layers[len(self._base.layers) :]),
            uploaded=sum(one.size for one in there.layers if one.diff_id.partition(":")[2][:12] in sent),
            downloaded=self._downloaded,
            mounted=mounted,
        )

    async def _refuse_a_name_of_others(self) -> None:
        """A tag that is on the daemon already and is of something else is not ours to move."""
        there = await self._client.found(f"/images/{self.reference}/json")
        if there is not None and (there["Config"].get("Labels") or {}).get(KEY_LABEL) != self._key:
            raise ImageFailed(
                f"`{self.image.name}`: the daemon has something else with this name: `{self.reference}`",
                "remove it with `docker image rm` if it is not needed",
                kind="taken",
                again=False,
            )

    async def _tagged(self, source: str, target: str) -> None:
        name, _, tag = target.rpartition(":")
        await self._client.post(f"/images/{source}/tag", {"repo": name, "tag": tag})

    async def _size(self, reference: str) -> int:
        told = await self._client.get(f"/images/{reference}/json")
        return int(told["Size"])


def outcome(image: Image, base: Base, key: str, how: How, *, digest: str) -> Made:
    """What is known of it in any case."""
    return Made(
        name=image.name,
        how=how,
        base=image.base,
        base_digest=base.digest,
        reference=f"{image.repository}:{key}",
        digest=digest,
        engine=EngineKind.DOCKER,
    )


def _linked(source: Path, target: Path) -> None:
    """The same file in the build's context, without a copy where one file system has both."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _content(path: Path) -> int:
    """Bytes of what is in a layer as a daemon counts them: files once, and the targets of symbolic links."""
    with tarfile.open(path) as members:
        return sum(
            len(m.linkname.encode()) if m.issym() else m.size for m in members if m.isreg() or m.issym()
        )
