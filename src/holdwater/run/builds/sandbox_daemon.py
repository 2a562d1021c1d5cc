"""Prepares a docker daemon for the sandboxes of a run: networks, firewall rules, and removal of orphans.

Workers create and remove containers (`sandbox/docker/`); images come from `docker_supply.py`. While the
daemon is gone, no attempt is admitted.
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

from ...core.config import RunConfig
from ...core.errors import HoldwaterError, RunFailed, RunStopped
from ...core.failures import DAEMON
from ...core.image import Note
from ...core.records import Network, SandboxSpec
from ...core.sandbox_kind import Containers
from ...docker.client import DaemonWatch, DockerClient, DockerError
from ...ledger.durable_files import make_directory, try_lock, write_private
from ...rollout.periodic_task import PeriodicTask
from ...sandbox.docker import network
from ...sandbox.docker.sweep import DockerSweepReport, reap, sweep
from ..setup.config import ProcessEnvironment
from .build_daemon import find_state_directory

RUN_SUFFIX = ".run"  # suffix of a living run's lock file
HOME_FILE = "home"
LOOK_SECONDS = 0.5
REAP_SECONDS = 5.0
LONGEST_REAP = 60.0
CLOSING = 60.0  # seconds for one removal pass at the end of the run
SETTLING = 15.0  # seconds after which no further pass begins


class DaemonControls(NamedTuple):
    """The calls by which a `SandboxDaemon` controls and queries its run."""

    hold: Callable[[str], None]
    release: Callable[[str], None]
    stop: Callable[[HoldwaterError], None]
    living: Callable[[], Collection[int]]  # attempts that may have a container


class SandboxDaemon:
    """Opened around one run."""

    def __init__(self, config: RunConfig, environment: ProcessEnvironment, note: Note) -> None:
        self.client = DockerClient(environment.docker_host)
        self.watch = DaemonWatch(self.client)
        self._config = config
        self._state = find_state_directory(environment)
        self._note = note
        self._fd = -1
        self._networks: set[Network] = set()  # bound: the kinds of `Network`
        self._making = asyncio.Lock()
        self._known_failures: set[str] = set()  # leftovers that could not be removed last time
        self._gone_since: float | None = None
        self._controls: DaemonControls | None = None
        self.containers = Containers(host=environment.docker_host, run=config.id, home="")

    async def __aenter__(self) -> SandboxDaemon:
        await self.client.__aenter__()
        try:
            make_directory(self._state)
            self._fd = self._lock_run_file(self._config.id)
            config = self._config
            self.containers = Containers(
                host=self.client.host,
                run=config.id,
                home=_read_home(self._state),
                mounts=config.mounts,
                read_only=config.read_only,
            )
            await self._sweep_dead_runs()
            self._note_failures(await reap(self.client, self.containers, ()))
            address = (await self._make_network(Network.GATEWAY)).address
            self.containers = msgspec.structs.replace(self.containers, gateway=address)
            await self.watch.__aenter__()
        except BaseException:  # boundary: close what was opened, then re-raise
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
            self._run_file(self._config.id).unlink(missing_ok=True)

    async def remove_containers(self) -> None:
        """Remove the containers left when no attempt lives any more; they would keep their images in use."""
        try:
            self._note_failures(await reap(self.client, self.containers, ()))
        except DockerError as error:
            self._note("cleanup.failed", f"containers of the run: {error.message}")

    async def provide_networks(self, starts: Sequence[SandboxSpec]) -> None:
        """Create the networks that these sandboxes need."""
        for start in starts:
            if (start.network or self._config.network) is Network.OPEN:
                await self._make_network(Network.OPEN)

    async def await_return(self) -> None:
        """Wait until the daemon answers; `_look` stops the run if it stays away."""
        while True:
            try:
                await self.client.get("/version")
                return
            except DockerError:
                await asyncio.sleep(LOOK_SECONDS)

    def suspect(self) -> None:
        """Hold admission until the next check of the daemon, because an attempt has seen it die."""
        if self._controls is not None:
            self._controls.hold(DAEMON)

    def periodic_tasks(self, run: DaemonControls) -> Sequence[PeriodicTask]:
        self._controls = run
        return (
            PeriodicTask("daemon", LOOK_SECONDS, self._look),
            PeriodicTask("reaper", REAP_SECONDS, self._reap, LONGEST_REAP),
        )

    async def _look(self) -> None:
        """Check that the daemon answers; if not, hold admission, and stop the run after `disk_patience`."""
        run = self._controls
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
        if self._gone_since is None and self._controls is not None:
            self._note_failures(await reap(self.client, self.containers, self._controls.living()))

    async def _make_network(self, kind: Network) -> network.BridgeNetwork:
        async with self._making:
            bridge = await network.make_network(self.client, self.containers, kind)
            if kind is Network.GATEWAY and kind not in self._networks:
                await self._raise_fence(bridge)
            self._networks.add(kind)
            return bridge

    async def _raise_fence(self, bridge: network.BridgeNetwork) -> None:
        if why := await network.add_rules(bridge, self.containers.network(Network.GATEWAY)):
            told = "services of this machine that listen on all addresses can be reached from sandboxes"
            self._note("fence.missing", f"{told}: {why}")

    async def _clear(self) -> None:
        """Remove all that the run has on the daemon. Repeat: a daemon that is just back needs a moment."""
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
        """Return what could not be removed, with reasons."""
        swept = await sweep(self.client, self.containers.home, lambda run: run != self._config.id)
        return (*swept.left, *await network.remove_rules(self.containers.network(Network.GATEWAY)))

    async def _sweep_dead_runs(self) -> None:
        """Remove the leftovers of dead runs of this machine."""
        swept = await sweep(self.client, self.containers.home, self._lives)
        self._note_failures(swept)
        if swept.containers or swept.networks:
            told = f"{swept.containers} containers and {swept.networks} networks of dead runs are removed"
            self._note("orphans.removed", told)
        for name in await network.list_marks():
            if not self._lives(name.removeprefix("holdwater-")):
                for problem in await network.remove_rules(name):
                    self._note("cleanup.failed", problem)

    def _note_failures(self, swept: DockerSweepReport) -> None:
        """Note each failed removal once as an event; every later pass tries it again."""
        for left in set(swept.left) - self._known_failures:
            self._note("cleanup.failed", left)
        self._known_failures = set(swept.left)

    def _lives(self, run: str) -> bool:
        """Return whether a run of this machine has a conductor; true for this run."""
        if run == self._config.id:
            return True
        try:
            fd = os.open(self._run_file(run), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            return not try_lock(fd)
        finally:
            os.close(fd)

    def _lock_run_file(self, run: str) -> int:
        """Open and lock the file whose lock shows that the run has a conductor; return its descriptor."""
        fd = os.open(self._run_file(run), os.O_RDWR | os.O_CREAT, 0o600)
        if not try_lock(fd):
            os.close(fd)
            raise RunFailed(f"another process conducts this run: `{run}`", kind="locked")
        return fd

    def _run_file(self, run: str) -> Path:
        return self._state / (Path(run).name + RUN_SUFFIX)


async def check_daemon(environment: ProcessEnvironment) -> None:
    """Raise a clear error if no daemon answers, before anything is started."""
    try:
        async with DockerClient(environment.docker_host):
            return
    except DockerError as error:
        end = "" if error.hint.endswith("?") else ";"
        hint = f"{error.hint}{end} `DOCKER_HOST` names another daemon"
        raise RunFailed(error.message, hint, kind=DAEMON) from error


def _read_home(state: Path) -> str:
    """Return the id by which the daemon knows runs of this machine; it is written once."""
    path, new = state / HOME_FILE, state / f".{HOME_FILE}.{os.getpid()}"
    write_private(new, uuid.uuid4().hex.encode())
    try:
        path.hardlink_to(new)
    except FileExistsError:
        pass  # the file existed, or another run was first
    finally:
        new.unlink()
    return path.read_text()
