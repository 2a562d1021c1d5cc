"""A docker daemon as a build uses it: its engine, its janitor, and its disk as the store of the run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from types import TracebackType

from ...core.config import RunConfig
from ...core.errors import HoldwaterError, RunStopped
from ...core.image import FailedForecast, ImageBlueprint, ImageEngine, ImageForecast, ImageOutcome, Note
from ...docker.build import find_docker
from ...docker.client import DaemonWatch, DockerClient, DockerError
from ...governor.resource_reading import DiskReading
from ...image.docker.bases import BaseKeeper
from ...image.docker.daemon import DaemonDisk, DaemonLeftover, find_daemon_disk, measure_disk, preflight
from ...image.docker.engine import BuildOptions, DockerEngine
from ...image.docker.janitor import Janitor
from ...image.registry.lookup import RegistryLookup
from ..setup.config import ProcessEnvironment

STORE = "daemon"
LOOK_SECONDS = 0.5


class BuildDaemon:
    """Opened for a build. Implements `ExternalStore` of `run/resources/disk_space.py` after `begin`."""

    def __init__(
        self, run: str, config: RunConfig, environment: ProcessEnvironment, bases: RegistryLookup, note: Note
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
        self._before = 0  # bytes in use when the build began

    async def __aenter__(self) -> BuildDaemon:
        try:
            self._client = await self._stack.enter_async_context(DockerClient(self._environment.docker_host))
            self.watch = await self._stack.enter_async_context(DaemonWatch(self._client))
            self._disk: DaemonDisk = await find_daemon_disk(self._client)
            self._before = self._disk.total - self._disk.free
            keeper = BaseKeeper if self._recipe.keep else Janitor
            janitor = keeper(
                self._client,
                find_state_directory(self._environment),
                self._run,
                self._recipe.daemon_cache,
                self._note,
            )
            self._janitor = await self._stack.enter_async_context(janitor)
        except BaseException:  # boundary: close what was opened, then re-raise
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def open_engine(self, blueprint: ImageBlueprint, force: bool) -> ImageEngine:
        way = BuildOptions(path=self._environment.path, network=self._recipe.network, force=force)
        engine = DockerEngine(blueprint, self._client, self._bases, self._janitor, self._note, way)
        return await self._stack.enter_async_context(engine)

    async def await_return(self) -> None:
        """Wait until the daemon answers again; raise TimeoutError after `disk_patience` seconds."""
        async with asyncio.timeout(self._patience):
            while True:
                try:
                    self._disk = await find_daemon_disk(self._client)
                    self._janitor.change_disk(self._disk)
                    return
                except (DockerError, RunStopped):
                    await asyncio.sleep(LOOK_SECONDS)

    def begin(self, foreseen: Sequence[ImageForecast | FailedForecast]) -> None:
        """Raise if the largest image does not fit on the disk. Later disk use counts as the build's."""
        wanted = [one for one in foreseen if isinstance(one, ImageForecast) and one.how is ImageOutcome.MADE]
        need = max((one.disk for one in wanted), default=0)
        disk = measure_disk(self._disk.path)
        preflight(need, disk if self._budget is None else _cap_disk(disk, self._budget))
        self._before = disk.total - disk.free

    def allowance(self) -> int:
        """Return the bytes on the disk that a build may use now."""
        free = self.disk().free
        return free if self._budget is None else min(free, self._budget)

    async def make_room(self, lacking: int) -> None:
        await self._janitor.make_room(self.disk().free + lacking)

    def disk(self) -> DiskReading:
        now = self._read_disk()
        return DiskReading(path=now.path, free=now.free, total=now.total, memory=False, names=(STORE,))

    def used_bytes(self) -> int:
        now = self._read_disk()
        return max(0, now.total - now.free - self._before)

    def _read_disk(self) -> DaemonDisk:
        """Return the current reading; while the daemon is gone, the last one."""
        try:
            self._disk = measure_disk(self._disk.path)
        except OSError:
            pass  # `await_return` finds the disk again
        return self._disk


async def clean_daemon(environment: ProcessEnvironment, *, do: bool) -> list[DaemonLeftover]:
    """List holdwater's leftovers on the daemon; with `do`, remove all that no living build needs."""
    notes: list[str] = []  # bound: the failures of a few clean-up steps
    async with DockerClient(environment.docker_host) as client:
        janitor = Janitor(
            client, find_state_directory(environment), "clean", 0, lambda kind, said: notes.append(said)
        )
        async with janitor:
            left = await janitor.list_leftovers()
            if do:
                await janitor.clear()
    if notes:
        raise HoldwaterError(f"not everything could be removed: {'; '.join(notes)}")
    return left


async def inspect_daemon(environment: ProcessEnvironment) -> tuple[DaemonDisk, str]:
    """Return the disk that builds use, and the path of the docker command."""
    async with DockerClient(environment.docker_host) as client:
        with tempfile.TemporaryDirectory(prefix="holdwater-docker-") as home:
            docker = await find_docker(environment.docker_host, Path(home), environment.path)
        return await find_daemon_disk(client), docker.client.path


async def list_protections(environment: ProcessEnvironment) -> tuple[str, ...]:
    """Return the daemon's protections beside namespaces: `seccomp`, `apparmor`, `userns`, ..."""
    async with DockerClient(environment.docker_host) as client:
        options = (await client.get("/info")).get("SecurityOptions") or ()
    found = [dict(part.partition("=")[::2] for part in option.split(",")) for option in options]
    unconfined = {"seccomp": "unconfined"}
    return tuple(
        option["name"]
        for option in found
        if "name" in option and unconfined.get(option["name"]) != option.get("profile", "")
    )


def find_state_directory(environment: ProcessEnvironment) -> Path:
    """Return the directory where janitors of this machine record holdwater's objects on a daemon."""
    daemon = sha256(environment.docker_host.encode()).hexdigest()[:16]
    return environment.cache / "daemons" / daemon


def _cap_disk(disk: DaemonDisk, budget: int) -> DaemonDisk:
    return DaemonDisk(path=disk.path, total=disk.total, free=min(disk.free, budget))
