"""What a conductor keeps on a docker daemon for its sandboxes: networks, the fence, and no orphans.

Containers are made and removed by workers (`sandbox/docker/`), images come from `supply.py`. While the daemon
is gone nobody is admitted.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import msgspec

from ..core.config import RunConfig
from ..core.containers import Containers
from ..core.errors import HoldwaterError, RunFailed, RunStopped
from ..core.failures import DAEMON
from ..core.image import Note
from ..core.records import Network, Start
from ..docker.client import DockerClient, DockerError
from ..docker.liveness import DaemonWatch
from ..image.docker.locks import locked
from ..ledger.private import make_directory, write_private
from ..rollout.duty import Duty
from ..sandbox.docker import fence, network
from ..sandbox.docker.sweep import Swept, reap, sweep
from .config import Environment
from .daemon import state_of

ALIVE = ".run"  # what the name of a living run's file ends with
HOME = "home"
LOOK_SECONDS = 0.5
REAP_SECONDS = 5.0
LONGEST_REAP = 60.0
CLOSING = 60.0  # seconds for one removal of what is left when the run is over
SETTLING = 15.0  # seconds after which none is begun again


class Levers(NamedTuple):
    """What a dock does to its run, and what it asks of it."""

    hold: Callable[[str], None]
    release: Callable[[str], None]
    stop: Callable[[HoldwaterError], None]
    living: Callable[[], Collection[int]]  # attempts that may have a container


class Dock:
    """One run's, opened around it."""

    def __init__(self, config: RunConfig, environment: Environment, note: Note) -> None:
        self.client = DockerClient(environment.docker_host)
        self.watch = DaemonWatch(self.client)
        self._config = config
        self._state = state_of(environment)
        self._note = note
        self._fd = -1
        self._made: set[Network] = set()  # a handful of kinds
        self._making = asyncio.Lock()
        self._known: set[str] = set()  # what could not be removed last time
        self._gone_since: float | None = None
        self._run: Levers | None = None
        self.containers = Containers(host=environment.docker_host, run=config.id, home="")

    async def __aenter__(self) -> Dock:
        await self.client.__aenter__()
        try:
            make_directory(self._state)
            self._fd = self._sign(self._config.id)
            config = self._config
            self.containers = Containers(
                host=self.client.host,
                run=config.id,
                home=_home(self._state),
                mounts=config.mounts,
                read_only=config.read_only,
            )
            await self._bury()
            self._told(await reap(self.client, self.containers, ()))
            address = (await self._network(Network.GATEWAY)).address
            self.containers = msgspec.structs.replace(self.containers, gateway=address)
            await self.watch.__aenter__()
        except BaseException:  # boundary: given back, then raised again
            await self.client.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._clear()
        finally:
            await self.watch.__aexit__(None, None, None)
            await self.client.__aexit__(None, None, None)
            os.close(self._fd)
            self._file(self._config.id).unlink(missing_ok=True)

    async def empty(self) -> None:
        """No attempt lives any more: what is left of their containers goes, as it holds images."""
        try:
            self._told(await reap(self.client, self.containers, ()))
        except DockerError as error:
            self._note("cleanup.failed", f"containers of the run: {error.message}")

    async def provide(self, starts: Sequence[Start]) -> None:
        """The networks that these need."""
        for start in starts:
            if (start.network or self._config.network) is Network.OPEN:
                await self._network(Network.OPEN)

    async def returned(self) -> None:
        """Wait until the daemon answers; `_look` stops the run if it stays away."""
        while True:
            try:
                await self.client.get("/version")
                return
            except DockerError:
                await asyncio.sleep(LOOK_SECONDS)

    def suspect(self) -> None:
        """Hold admission until the daemon was looked at again: an attempt has seen it die."""
        if self._run is not None:
            self._run.hold(DAEMON)

    def duties(self, run: Levers) -> Sequence[Duty]:
        self._run = run
        return (
            Duty("daemon", LOOK_SECONDS, self._look),
            Duty("reaper", REAP_SECONDS, self._reap, LONGEST_REAP),
        )

    async def _look(self) -> None:
        """Is the daemon there? Nobody is admitted while it is not; in the end the run stops."""
        run = self._run
        assert run is not None
        try:
            await self.client.get("/version")
        except DockerError as error:
            if self._gone_since is None:
                self._gone_since = time.monotonic()
                run.hold(DAEMON)
                self._note("daemon.gone", error.message)
            elif time.monotonic() - self._gone_since > self._config.disk_patience:
                run.stop(RunStopped(error.message, "start it, then `holdwater resume`"))
            return
        if self._gone_since is not None:
            self._note("daemon.back", f"after {time.monotonic() - self._gone_since:.0f} s")
            self._gone_since = None
        run.release(DAEMON)

    async def _reap(self) -> None:
        if self._gone_since is None and self._run is not None:
            self._told(await reap(self.client, self.containers, self._run.living()))

    async def _network(self, kind: Network) -> network.Bridge:
        async with self._making:
            bridge = await network.make(self.client, self.containers, kind)
            if kind is Network.GATEWAY and kind not in self._made:
                await self._fence(bridge)
            self._made.add(kind)
            return bridge

    async def _fence(self, bridge: network.Bridge) -> None:
        if why := await fence.up(bridge, self.containers.network(Network.GATEWAY)):
            told = "services of this machine that listen on all addresses can be reached from sandboxes"
            self._note("fence.missing", f"{told}: {why}")

    async def _clear(self) -> None:
        """Remove all that the run has on the daemon: again and again, as one that is back needs a moment."""
        left: tuple[str, ...] = ()
        until = time.monotonic() + SETTLING
        while True:
            try:
                async with asyncio.timeout(CLOSING):
                    left = await self._clear_once()
            except (DockerError, TimeoutError) as failed:
                left = (f"containers and networks of the run: {failed}",)
                if self._gone_since is not None:
                    break  # the run did not wait for the daemon either
            if not left or time.monotonic() > until:
                break
            await asyncio.sleep(LOOK_SECONDS)
        for what in left:
            self._note("cleanup.failed", what)

    async def _clear_once(self) -> tuple[str, ...]:
        """What is left, and why."""
        swept = await sweep(self.client, self.containers.home, lambda run: run != self._config.id)
        return (*swept.left, *await fence.down(self.containers.network(Network.GATEWAY)))

    async def _bury(self) -> None:
        """Remove what dead runs of this machine left."""
        swept = await sweep(self.client, self.containers.home, self._lives)
        self._told(swept)
        if swept.containers or swept.networks:
            told = f"{swept.containers} containers and {swept.networks} networks of dead runs are removed"
            self._note("orphans.removed", told)
        for name in await fence.names():
            if not self._lives(name.removeprefix("holdwater-")):
                for problem in await fence.down(name):
                    self._note("cleanup.failed", problem)

    def _told(self, swept: Swept) -> None:
        """What could not be removed is tried again; that it could not is an event, once."""
        for left in set(swept.left) - self._known:
            self._note("cleanup.failed", left)
        self._known = set(swept.left)

    def _lives(self, run: str) -> bool:
        """Whether a run of this machine has a conductor; this one does."""
        if run == self._config.id:
            return True
        try:
            fd = os.open(self._file(run), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not locked(fd)
        finally:
            os.close(fd)

    def _sign(self, run: str) -> int:
        """A file whose lock says that the run has a conductor."""
        fd = os.open(self._file(run), os.O_RDWR | os.O_CREAT, 0o600)
        if not locked(fd):
            os.close(fd)
            raise RunFailed(f"another process conducts this run: `{run}`", kind="locked")
        return fd

    def _file(self, run: str) -> Path:
        return self._state / (Path(run).name + ALIVE)


async def check_daemon(environment: Environment) -> None:
    """One clear error where no daemon answers, before anything is started."""
    try:
        async with DockerClient(environment.docker_host):
            return
    except DockerError as error:
        hint = f"{error.hint} `DOCKER_HOST` names another one"
        raise RunFailed(error.message, hint, kind=DAEMON) from error


def _home(state: Path) -> str:
    """What runs of this machine are known by on the daemon: written down once."""
    path, new = state / HOME, state / f".{HOME}.{os.getpid()}"
    write_private(new, uuid.uuid4().hex.encode())
    try:
        path.hardlink_to(new)
    except FileExistsError:
        pass  # it was there, or another run was first
    finally:
        new.unlink()
    return path.read_text()
