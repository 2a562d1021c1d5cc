"""The images that a run's sandboxes start from, on a daemon: found there, pulled or built, once for all.

What is ours of them, and when it goes, is the `keeper.py`'s; which image an instance has is decided in
`run/supply.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...core.errors import ImageFailed
from ...core.failures import DISK
from ...core.image import Platform
from ...core.records import MiB, Record
from ...docker.build import Build, BuildFailed, Docker, find_docker
from ...docker.client import DockerClient
from . import causes
from .bases import Base, Bases, pinned
from .context import Context
from .flights import Flights
from .janitor import SPACE
from .keeper import Keeper
from .making import Way
from .pulling import Puller, missing

BUILT = f"{SPACE}/built"  # no run is called so: what is built from the same is the same for all of them


class Copy(Record, frozen=True):
    """An image that the daemon has."""

    reference: str  # what a container is made from
    names: tuple[str, ...] = ()  # all that it has of us; none: it is not ours


class Stock:
    """One run's. `room` says how many bytes its images may still take."""

    def __init__(
        self,
        client: DockerClient,
        bases: Bases,
        keeper: Keeper,
        platform: Platform,
        way: Way,
        room: Callable[[], int],
        logs: Path,
    ) -> None:
        self._client = client
        self._bases = bases
        self._keeper = keeper
        self._platform = platform
        self._way = way
        self._room = room
        self._logs = logs
        self._puller = Puller(client, bases, platform)
        self._flights: Flights[None] = Flights()
        self._finding: Flights[Docker] = Flights()
        self._docker: Docker | None = None
        self._largest = 0  # bytes of the largest image that was built

    async def local(self, reference: str) -> bool:
        """Whether the daemon has an image of this name, whoever brought it."""
        return await self._client.found(f"/images/{reference}/json") is not None

    async def lacks(self, reference: str) -> int:
        """Bytes that pulling it would take."""
        base = await self._bases.base(reference, self._platform)
        source = pinned(reference, base.digest)
        if source in self._flights or await self.local(self._tag(source)):
            return 0  # or whoever brings it has leased it
        return sum(await missing(self._client, self._keeper, source, base))

    async def lacks_built(self, context: Context) -> int:
        """The same for building it, as far as can be told."""
        source = _built(context)
        if source in self._flights or await self.local(self._tag(source)) or await self.local(source):
            return 0
        return max(context.size, self._largest)

    async def pulled(self, reference: str, held: ExitStack) -> Copy:
        """It is there, and stays until `held` is closed."""
        base = await self._bases.base(reference, self._platform)
        source = pinned(reference, base.digest)
        return await self._had(source, held, partial(self._pull, reference, source, base))

    async def built(self, context: Context, seconds: float, held: ExitStack) -> Copy:
        """The same for what is built from this."""
        return await self._had(_built(context), held, partial(self._build, context, seconds))

    async def _had(
        self, source: str, held: ExitStack, bring: Callable[[], Coroutine[Any, Any, None]]
    ) -> Copy:
        tag = self._tag(source)
        held.enter_context(self._keeper.holding(source, tag))
        await self._flights.join(source, partial(self._fetched, source, tag, bring))
        return Copy(reference=tag, names=(source, tag))

    async def _fetched(self, source: str, tag: str, bring: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if await self._keeper.tagged(source, tag):
            return
        await bring()
        if not await self._keeper.tagged(source, tag):
            raise ImageFailed(f"`{source}`: somebody removed it at once", kind="gone")

    def _tag(self, source: str) -> str:
        return self._keeper.tag(sha256(source.encode()).hexdigest()[:32])

    async def _pull(self, reference: str, source: str, base: Base) -> None:
        await self._make_room(reference, sum(await missing(self._client, self._keeper, source, base)))
        async with self._keeper.using(source, base.diff_ids) as absent:
            if absent:
                await self._puller.pull(source, base, f"`{reference}` cannot be pulled")
            self._keeper.pulled(source, await self._size(source))

    async def _build(self, context: Context, seconds: float) -> None:
        source = _built(context)
        await self._make_room(context.directory, max(context.size, self._largest))
        docker = await self._found()
        self._keeper.own(source)
        build = Build(
            dockerfile=context.dockerfile,
            tag=source,
            context=context.directory,
            platform=str(self._platform),
            network=self._way.network,
            seconds=seconds,
        )
        log = self._logs / f"image-{context.digest[:12]}.build.log"
        try:
            async with self._keeper.building(lambda now: replace(context.trace, begun=now)):
                await docker.build(build, log)
        except BuildFailed as error:
            raise _why(context, error, log) from error
        size = await self._size(source)
        self._largest = max(self._largest, size)
        self._keeper.pulled(source, size)
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

    async def _found(self) -> Docker:
        """The command that builds; looked for when the first build comes."""
        if self._docker is None:
            home = self._keeper.work / "docker"
            look = partial(find_docker, self._client.host, home, self._way.path)
            self._docker = await self._finding.join("docker", look)
        return self._docker

    async def _size(self, reference: str) -> int:
        return int((await self._client.get(f"/images/{reference}/json"))["Size"])


def _built(context: Context) -> str:
    return f"{BUILT}:{context.digest}"


def _why(context: Context, error: BuildFailed, log: Path) -> Exception:
    """A step that went to the network may go through the next time."""
    doing = f"`{context.directory}`: its image cannot be built"
    found = causes.of_build(doing, error.message, timed_out=error.timed_out)
    if found.kind == "build":
        return ImageFailed(
            found.message, f"see the whole output in `{log.name}` of the run's logs", kind="build"
        )
    return found
