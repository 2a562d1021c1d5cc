"""The engine `docker`: a real build for recipes with steps, pushed, and nothing of it left on the daemon.

Base phase, then assembly, then push, each image for itself. What was put on the daemon is written down and
removed by `janitor.py`, whatever happens; the Dockerfiles are in `dockerfile.py`. It waits for no room: the
caller admits an image by what `foresee` says that it needs.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from msgspec.structs import replace

from ..core.errors import BadInput, ImageFailed
from ..core.image import (
    KEY_LABEL,
    Blueprint,
    EngineKind,
    Foreseen,
    How,
    Image,
    Made,
    Note,
    Platform,
    Progress,
    key_of,
    labels_of,
)
from ..core.records import Record
from ..docker.build import Build, BuildFailed, Docker, find_docker
from ..docker.client import DaemonGone, DockerClient, DockerError
from . import causes
from .dockerfile import Dockerfile, assembly, base_phase
from .janitor import Janitor
from .shelter import sheltered
from .traces import Trace, commands_of

CLEANING = 120.0  # seconds for the clean-up after an image
NO_AUTH = "e30="  # `{}`: daemons want the header in any case


class BaseLayer(Record, frozen=True):
    """A layer of a base, as its registry has it."""

    digest: str
    size: int  # bytes, compressed
    diff_id: str


class Base(Record, frozen=True):
    """An image in a registry."""

    digest: str  # of what the reference leads to: it goes into the key
    config: str  # the digest of its configuration
    layers: tuple[BaseLayer, ...] = ()
    unpacked: int = 0  # bytes, estimated

    @property
    def size(self) -> int:
        """Bytes, compressed."""
        return sum(layer.size for layer in self.layers)

    @property
    def diff_ids(self) -> list[str]:
        return [layer.diff_id for layer in self.layers]


class Bases(Protocol):
    """What this engine asks of registries. Errors are `AttemptError`s."""

    async def base(self, reference: str, platform: Platform) -> Base:
        """What the reference leads to."""

    async def found(self, reference: str) -> tuple[str, str] | None:
        """The digest and the key label of what has this tag; None: nothing has it."""

    async def alias(self, reference: str, tag: str) -> None:
        """Give what the reference leads to this tag as well, in the same repository."""

    def auth(self, host: str) -> str:
        """The `X-Registry-Auth` header for a registry, which is secret; empty: none."""


class Way(Record, frozen=True):
    """How builds are carried out."""

    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where `docker` is looked for
    network: str = ""  # of RUN steps; empty: the daemon's own
    seconds: float = 3600.0  # for one build


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
        self._docker: Docker | None = None
        self._added: tuple[int, ...] = ()  # bytes of each layer's files, as the daemon counts them
        self._keys: dict[str, asyncio.Lock] = {}  # bound: images that are being made

    async def __aenter__(self) -> DockerEngine:
        home = self._janitor.work / "docker"
        self._docker = await find_docker(self._client.host, home, self._way.path)
        if self._docker.refused:
            chosen = self._docker.client
            passed = "; ".join(self._docker.refused)
            self._note("docker.client", f"builds go through `{chosen.path}` ({chosen.release}); not {passed}")
        self._context.mkdir(parents=True, exist_ok=True)
        for number, layer in enumerate(self._blueprint.layers):
            _linked(Path(layer.path), self._context / _file(number))
        self._added = tuple(_content(Path(layer.path)) for layer in self._blueprint.layers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._docker = None  # its directory is the janitor's, and goes with the run

    async def foresee(self, image: Image) -> Foreseen:
        base = await self._bases.base(image.base, self._platform)
        key = key_of(base.digest, self._blueprint)
        found = await self._bases.found(f"{image.repository}:{key}")
        present = found is not None and found[1] == key
        if not present:
            self._janitor.expect(base.digest, base.diff_ids)
        download, unpacked = (0, 0) if present else await self._missing(image, base)
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
        async with self._one_at_a_time(key):
            found = await self._bases.found(f"{image.repository}:{key}")
            if found is not None and found[1] == key:
                made = _made(image, base, key, How.PRESENT, digest=found[0])
            else:
                making = _Making(self, image, base, key, log, progress)
                made = await self._cleanly(making)
                made = replace(made, replaced=found[0] if found is not None else "")
        for alias in image.aliases:
            await self._bases.alias(made.reference, alias)
        return replace(made, aliases=image.aliases, seconds=time.monotonic() - begun)

    async def _cleanly(self, making: _Making) -> Made:
        """Make it; whatever happens, what it took on the daemon is given back."""
        try:
            return await making.made()
        except DaemonGone as error:
            raise causes.of_daemon(f"`{making.image.name}`: {error.message}", error.hint) from error
        except DockerError as error:
            raise causes.of_transfer(f"`{making.image.name}`: the daemon refused", error.message) from error
        finally:
            work = self._janitor.settle(making.tags)
            await sheltered(work, CLEANING, self._note, f"after `{making.image.name}`")

    async def _missing(self, image: Image, base: Base) -> tuple[int, int]:
        """Bytes to download, and bytes that they take unpacked, of what the daemon does not have."""
        if await self._client.found(f"/images/{pinned(image.base, base.digest)}/json") is not None:
            return 0, 0
        lacking = base.layers[self._janitor.held(base.diff_ids) :]
        download = sum(layer.size for layer in lacking)
        return download, round(base.unpacked * download / base.size) if base.size else 0

    @asynccontextmanager
    async def _one_at_a_time(self, key: str) -> AsyncIterator[None]:
        """Two images of the same content are the same image: the second finds it made."""
        lock = self._keys.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._keys.pop(key, None)

    @property
    def _context(self) -> Path:
        return self._janitor.work / "context"


class _Making:
    """One image on its way."""

    def __init__(
        self, engine: DockerEngine, image: Image, base: Base, key: str, log: Path, progress: Progress
    ) -> None:
        self.image = image
        self.reference = f"{image.repository}:{key}"
        self.tags = [engine._janitor.tag(f"{key}{word}") for word in ("", "-base", "-from")]
        self._engine = engine
        self._client = engine._client
        self._janitor = engine._janitor
        self._blueprint = engine._blueprint
        self._base = base
        self._key = key
        self._log = log
        self._progress = progress
        self._downloaded = 0

    async def made(self) -> Made:
        final, built, source = self.tags
        pulled = pinned(self.image.base, self._base.digest)
        self._progress.phase("base")
        async with self._janitor.using(pulled, self._base.diff_ids) as absent:
            if absent:
                await self._janitor.make_room(self._base.size + self._base.unpacked)
                await self._pull(pulled)
            await self._tagged(pulled, source)
            self._janitor.pulled(pulled, await self._size(source))
            if self._blueprint.steps.before:
                await self._built("base", base_phase(source, self._blueprint.steps.before), built)
                await self._janitor.reset()
                source = built
            self._progress.phase("assembly")
            labels = labels_of(self._base.digest, self._blueprint)
            names = [_file(number) for number in range(len(self._blueprint.layers))]
            what = assembly(source, names, self._blueprint.edits, labels, self._blueprint.steps.after)
            await self._built("assembly", what, final)
            self._progress.phase("push")
            return await self._pushed(final)

    async def _pull(self, reference: str) -> None:
        name, _, digest = reference.partition("@")
        sizes = {layer.digest.partition(":")[2][:12]: layer.size for layer in self._base.layers}
        query = {"fromImage": name, "tag": digest, "platform": str(self._engine._platform)}
        doing = f"`{self.image.name}`: base `{self.image.base}` cannot be pulled"
        seen: dict[str, int] = {}  # bound: the base's layers
        try:
            async for message in self._client.stream("/images/create", query, self._auth(name)):
                if (one := message.get("id", "")) in sizes:
                    seen[one] = _fetched(message, seen.get(one, 0), sizes[one])
                    self._progress.disk(sum(seen.values()))
        except DaemonGone:
            raise
        except DockerError as error:
            raise causes.of_transfer(doing, error.message) from error
        self._downloaded = sum(seen.values())

    async def _built(self, phase: str, what: Dockerfile, tag: str) -> None:
        """Build under a trace, so that what it leaves can be told by it."""
        await self._janitor.settle([tag])  # a tag that moved away would leave an image without a name
        way = self._engine._way
        build = Build(
            dockerfile=what.text,
            tag=tag,
            context=str(self._engine._context),
            arguments=what.arguments,
            platform=str(self._engine._platform),
            network=way.network,
            seconds=way.seconds,
        )
        assert self._engine._docker is not None, "the engine is used outside of its `async with`"
        try:
            async with self._janitor.building(lambda now: self._trace(now, what)):
                await self._engine._docker.build(build, self._log)
        except BuildFailed as error:
            doing = f"`{self.image.name}`: {phase} on `{self.image.base}` cannot be built"
            raise causes.of_build(doing, error.message, timed_out=error.timed_out) from error
        self._progress.disk(await self._size(tag) + sum(layer.size for layer in self._blueprint.layers))

    def _trace(self, now: float, what: Dockerfile) -> Trace:
        steps = self._blueprint.steps
        return Trace(
            begun=now,
            commands=commands_of((*steps.before, *steps.after)),
            sizes=self._engine._added,
            sources=(len(what.text.encode()), sum(layer.size for layer in self._blueprint.layers)),
        )

    async def _pushed(self, tag: str) -> Made:
        repository = self.image.repository
        await self._refuse_a_name_of_others()
        digest, mounted, sent = "", 0, set[str]()
        async with self._janitor.naming(self.reference):
            self.tags.insert(0, self.reference)
            await self._tagged(tag, self.reference)
            doing = f"`{self.image.name}`: `{self.reference}` cannot be pushed"
            try:
                query = {"tag": self._key}
                async for told in self._client.stream(
                    f"/images/{repository}/push", query, self._auth(repository)
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
        there = await self._engine._bases.base(f"{repository}@{digest}", self._engine._platform)
        return replace(
            _made(self.image, self._base, self._key, How.MADE, digest=digest),
            layers=tuple(layer.digest for layer in there.layers[len(self._base.layers) :]),
            uploaded=sum(one.size for one in there.layers if one.diff_id.partition(":")[2][:12] in sent),
            downloaded=self._downloaded,
            mounted=mounted,
        )

    async def _refuse_a_name_of_others(self) -> None:
        """A tag that is on the daemon already and is of something else is not ours to move."""
        there = await self._client.found(f"/images/{self.reference}/json")
        labels = {} if there is None else there["Config"].get("Labels") or {}
        if there is not None and labels.get(KEY_LABEL) != self._key:
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

    def _auth(self, name: str) -> dict[str, str]:
        return {"X-Registry-Auth": self._engine._bases.auth(host_of(name)) or NO_AUTH}


def pinned(reference: str, digest: str) -> str:
    """`repository@digest`, whatever tag or digest the reference has."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}@{digest}"


def host_of(name: str) -> str:
    """The registry of a repository's name, as docker reads it."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def _fetched(message: dict[str, Any], before: int, size: int) -> int:
    """Bytes of a layer that are here by now."""
    status = message.get("status")
    if status in ("Download complete", "Pull complete", "Verifying Checksum"):
        return size
    if status == "Downloading":
        return min(size, int((message.get("progressDetail") or {}).get("current") or before))
    return before


def _made(image: Image, base: Base, key: str, how: How, *, digest: str) -> Made:
    return Made(
        name=image.name,
        how=how,
        base=image.base,
        base_digest=base.digest,
        reference=f"{image.repository}:{key}",
        digest=digest,
        engine=EngineKind.DOCKER,
    )


def _file(number: int) -> str:
    return f"layer-{number}.tar.gz"


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
