"""A docker daemon as a build uses it: its engine, its janitor, and its disk as the store of the run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from ..core.config import RunConfig
from ..core.errors import HoldwaterError, RunStopped
from ..core.image import Blueprint, Engine, Foreseen, How, Note, Unforeseen
from ..docker.build import find_docker
from ..docker.client import DockerClient, DockerError
from ..docker.liveness import DaemonWatch
from ..governor.reading import Disk
from ..image.docker.disk import DaemonDisk, daemon_disk, preflight, reread
from ..image.docker.engine import DockerEngine, Way
from ..image.docker.janitor import Janitor, Left
from ..image.registry.lookup import RegistryBases
from .config import Environment

STORE = "daemon"
LOOK_SECONDS = 0.5


class Daemon:
    """Opened for a build; a `run.space.Store` once it has begun."""

    def __init__(
        self, run: str, config: RunConfig, environment: Environment, bases: RegistryBases, note: Note
    ) -> None:
        assert config.recipe is not None
        self._recipe = config.recipe
        self._run = run
        self._budget = config.disk
        self._environment = environment
        self._bases = bases
        self._note = note
        self._stack = AsyncExitStack()
        self._patience = config.disk_patience
        self._before = 0  # bytes that were used when the build began

    async def __aenter__(self) -> Daemon:
        try:
            self._client = await self._stack.enter_async_context(DockerClient(self._environment.docker_host))
            self.watch = await self._stack.enter_async_context(DaemonWatch(self._client))
            self._disk: DaemonDisk = await daemon_disk(self._client)
            self._before = self._disk.total - self._disk.free
            janitor = Janitor(
                self._client, state_of(self._environment), self._run, self._recipe.cache, self._note
            )
            self._janitor = await self._stack.enter_async_context(janitor)
        except BaseException:  # boundary: given back, then raised again
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def engine(self, blueprint: Blueprint) -> Engine:
        way = Way(path=self._environment.path, network=self._recipe.network)
        engine = DockerEngine(blueprint, self._client, self._bases, self._janitor, self._note, way)
        return await self._stack.enter_async_context(engine)

    async def await_return(self) -> None:
        """Wait until the daemon answers again; TimeoutError after as long as a run waits for its disk."""
        async with asyncio.timeout(self._patience):
            while True:
                try:
                    self._disk = self._janitor.disk = await daemon_disk(self._client)
                    return
                except (DockerError, RunStopped):
                    await asyncio.sleep(LOOK_SECONDS)

    def begin(self, foreseen: Sequence[Foreseen | Unforeseen]) -> None:
        """Stop the build here if its largest image does not fit; what is used from now on is the build's."""
        wanted = [one for one in foreseen if isinstance(one, Foreseen) and one.how is How.MADE]
        need = max((one.disk for one in wanted), default=0)
        disk = reread(self._disk.path)
        preflight(need, disk if self._budget is None else _within(disk, self._budget))
        self._before = disk.total - disk.free

    async def make_room(self, lacking: int) -> None:
        await self._janitor.make_room(self.disk().free + lacking)

    def disk(self) -> Disk:
        now = self._read_disk()
        return Disk(path=now.path, free=now.free, total=now.total, memory=False, names=(STORE,))

    def used(self) -> int:
        now = self._read_disk()
        return max(0, now.total - now.free - self._before)

    def _read_disk(self) -> DaemonDisk:
        """As it is now; while the daemon is gone, as it was last."""
        try:
            self._disk = reread(self._disk.path)
        except OSError:
            pass  # `await_return` finds it again
        return self._disk


async def clean_daemon(environment: Environment, *, do: bool) -> list[Left]:
    """What is ours on the daemon; with `do` all of it that no living build needs is removed."""
    notes: list[str] = []  # bound: what a handful of steps can say
    async with DockerClient(environment.docker_host) as client:
        janitor = Janitor(client, state_of(environment), "clean", 0, lambda kind, said: notes.append(said))
        async with janitor:
            left = await janitor.left()
            if do:
                await janitor.clear()
    if notes:
        raise HoldwaterError(f"not everything could be removed: {'; '.join(notes)}")
    return left


async def look(environment: Environment) -> tuple[DaemonDisk, str]:
    """The disk that builds would use, and the command that they would go through."""
    async with DockerClient(environment.docker_host) as client:
        with tempfile.TemporaryDirectory(prefix="holdwater-docker-") as home:
            docker = await find_docker(environment.docker_host, Path(home), environment.path)
        return await daemon_disk(client), docker.client.path


async def list_protections(environment: Environment) -> tuple[str, ...]:
    """What the daemon protects its machine by, beside namespaces: `seccomp`, `apparmor`, `userns`, ..."""
    async with DockerClient(environment.docker_host) as client:
        options = (await client.get("/info")).get("SecurityOptions") or ()
    found = [dict(part.partition("=")[::2] for part in option.split(",")) for option in options]
    unconfined = {"seccomp": "unconfined"}
    return tuple(
        option["name"]
        for option in found
        if "name" in option and unconfined.get(option["name"]) != option.get("profile", "")
    )


def state_of(environment: Environment) -> Path:
    """Where janitors of this machine write down what is ours on a daemon."""
    daemon = sha256(environment.docker_host.encode()).hexdigest()[:16]
    return environment.cache / "daemons" / daemon


def _within(disk: DaemonDisk, budget: int) -> DaemonDisk:
    return DaemonDisk(path=disk.path, total=disk.total, free=min(disk.free, budget))
