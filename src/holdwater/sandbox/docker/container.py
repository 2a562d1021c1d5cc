"""One container of an attempt: creates, starts, connects, limits, restarts and removes it.

`spec.py` builds the request to the daemon. A container gets its name before it is created, so that it can be
removed even if the reply to its creation was lost. Errors of the daemon become failures of the attempt, never
of the agent. The patterns are docker's own messages, which are stable across releases.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from ...core.errors import AttemptError, ImageFailed, SandboxFailed
from ...core.records import Network
from ...docker.client import DaemonGone, DockerClient, DockerError
from .spec import ContainerSpec, build_body

CREATE_TIMEOUT = 120.0  # seconds to create or start a container: simultaneous requests wait for each other
REQUEST_TIMEOUT = 30.0  # seconds for any other reply
RESTART_TIMEOUT = 30.0
NOT_FOUND = "127"  # a shell's exit status for a missing program
LOOK_AGAIN = 0.05  # seconds between checks of a container that another process is removing

DAEMON_HINT = "the attempt is retried; check that the daemon runs and that nothing removes its containers"
GONE_MESSAGES = (
    "No such container",
    "is not running",
    "No such exec",
    "is dead",
    "is restarting",
    "marked for removal",
    "RWLayer of container",  # removal is in progress
)
MISSING_PROGRAM = ("executable file not found", "no such file or directory")
# runc's messages
STOPPED = ("cannot exec in a stopped", "cannot exec in a deleted", "cannot exec a container that has stopped")


class AttemptContainer:
    """A container, addressed by its name."""

    def __init__(self, client: DockerClient, name: str, networks: dict[Network, str]) -> None:
        self.client = client
        self.name = name
        self.path = f"/containers/{name}"
        self.id = ""
        self.pid = 0  # of its first process, on the daemon's machine
        self.volumes: tuple[str, ...] = ()  # directories on the daemon's machine
        self.resolves = False  # whether the daemon's resolver resolves names in it
        self._networks = networks
        self._network = Network.NONE
        self.started_at = 0.0  # a time before the start, by the daemon's clock

    async def create(self, wanted: ContainerSpec, network: Network) -> None:
        """Create the container; its files can be written before it is started."""
        asked = build_body(wanted)
        with translate_errors("cannot create a container"):
            try:
                told = await self._post_create(asked)
            except DockerError as error:
                if error.status != 409:
                    raise
                await self.remove(REQUEST_TIMEOUT)  # left by a worker that was killed during the same attempt
                told = await self._post_create(asked)
        self.id = told["Id"]
        self.resolves = wanted.resolves
        self._network = network
        self.started_at = time.time() - 1.0  # the daemon's clock may differ

    async def start(self) -> None:
        await self.client.post(f"{self.path}/start", seconds=CREATE_TIMEOUT)

    async def inspect(self) -> None:
        """Read pid and volumes of the running container."""
        told = await self.client.get(f"{self.path}/json", seconds=REQUEST_TIMEOUT)
        self.pid = told["State"]["Pid"]
        self.volumes = tuple(one["Source"] for one in told["Mounts"] if one["Type"] == "volume")

    async def _post_create(self, asked: dict[str, Any]) -> Any:
        return await self.client.post("/containers/create", {"name": self.name}, asked, CREATE_TIMEOUT)

    async def reach(self, network: Network) -> None:
        """Move the container from its network to another."""
        if network is self._network:
            return
        with translate_errors("cannot connect a container to another network"):
            left, joined = self._networks[self._network], self._networks[network]
            body = {"Container": self.name, "Force": True}
            await self.client.post(f"/networks/{left}/disconnect", body=body, seconds=REQUEST_TIMEOUT)
            await self.client.post(
                f"/networks/{joined}/connect", body={"Container": self.name}, seconds=REQUEST_TIMEOUT
            )
        self._network = network

    async def allow(self, memory: int) -> None:
        """Change the memory limit, together with the swap limit, as neither may exceed the other."""
        body = {"Memory": memory, "MemorySwap": memory}
        await self.client.post(f"{self.path}/update", body=body, seconds=REQUEST_TIMEOUT)

    async def running(self) -> bool:
        try:
            told = await self.client.get(f"{self.path}/json", seconds=REQUEST_TIMEOUT)
        except DockerError as error:
            if is_gone(error):
                return False
            raise
        return bool(told["State"]["Running"])

    async def events(self, kind: str, since: float) -> list[dict[str, Any]]:
        """Return the container's events of this kind, as far back as the daemon keeps them."""
        filters = msgspec.json.encode({"container": [self.id], "event": [kind]}).decode()
        query = {"since": f"{since:.3f}", "until": f"{time.time():.3f}", "filters": filters}
        async with self.client.open_body("GET", "/events", query, silence=REQUEST_TIMEOUT) as pieces:
            told = b"".join([piece async for piece in pieces])  # bound: the daemon keeps 256 events
        return [msgspec.json.decode(line) for line in told.splitlines() if line.strip()]

    async def exit_code(self) -> str | None:
        """Return the exit code of the first process; None if it runs, as far as the daemon's events say."""
        told = await self.events("die", self.started_at)
        return str(told[-1].get("Actor", {}).get("Attributes", {}).get("exitCode", "")) if told else None

    async def ended_at_once(self) -> bool:
        """Whether the first process ended because a program is missing."""
        try:
            return await self.exit_code() == NOT_FOUND
        except DockerError:
            return False

    async def population(self) -> int:
        """Return the number of processes in the container, as seen by the daemon's machine."""
        told = await self.client.get(f"{self.path}/top", seconds=REQUEST_TIMEOUT)
        return len(told["Processes"] or ())

    async def restart(self) -> None:
        """End all processes in the container by a restart; its files stay."""
        with translate_errors("cannot end the processes in a container"):
            await self.client.post(f"{self.path}/restart", {"t": "0"}, seconds=RESTART_TIMEOUT)
            told = await self.client.get(f"{self.path}/json", seconds=REQUEST_TIMEOUT)
        self.pid = told["State"]["Pid"]

    async def remove(self, seconds: float) -> None:
        """Remove the container; it is gone when this returns."""
        await remove_container(self.client, self.name, seconds)


async def remove_container(client: DockerClient, name: str, seconds: float) -> None:
    """Kill and remove a container with its unnamed volumes; a container that is already gone is no error."""
    until = time.monotonic() + seconds
    while True:
        try:
            query = {"force": "true", "v": "true"}
            await client.delete(f"/containers/{name}", query, seconds=seconds)
            return
        except DockerError as error:
            if error.status == 404:
                return
            if error.status != 409 or time.monotonic() > until:  # 409: another process is removing it
                raise
        await asyncio.sleep(LOOK_AGAIN)


def make_sleep_error() -> SandboxFailed:
    return SandboxFailed(
        "the container ended as soon as it was started",
        "an image needs `sh` and `sleep` on its PATH",
        kind="missing",
        again=False,
    )


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Turn a daemon error into a failure of the attempt; `doing` describes the failed operation."""
    try:
        yield
    except DockerError as error:
        raise make_failure(error, doing) from error


def make_failure(error: DockerError, doing: str) -> AttemptError:
    told = error.message.strip()
    if isinstance(error, DaemonGone):
        return SandboxFailed(f"{doing}: {told}", DAEMON_HINT, kind="daemon")
    if "No such image" in told:
        return ImageFailed(f"{doing}: {told}", "check whether it was removed meanwhile", kind="missing")
    if is_gone(error):
        return make_gone_error(doing)
    return SandboxFailed(f"{doing}: {told}", kind="daemon" if error.status >= 500 else "")


def is_gone(error: DockerError) -> bool:
    """Whether the container no longer exists or does not run."""
    return error.status in (404, 409, 500) and any(words in error.message for words in GONE_MESSAGES)


def make_gone_error(doing: str) -> SandboxFailed:
    return SandboxFailed(
        f"{doing}: the container is gone: something else stopped or removed it", DAEMON_HINT, kind="daemon"
    )


def make_start_error(told: str, program: str) -> SandboxFailed:
    """Return the error for a command whose program never ran."""
    if any(words in told for words in STOPPED):  # it stopped between the daemon's check and the start
        return make_gone_error("cannot start the command")
    if any(words in told for words in MISSING_PROGRAM) and "chdir" not in told:
        return SandboxFailed(f"no such program in the sandbox: `{program}`", kind="missing", again=False)
    refused = "chdir" in told or "find user" in told or "permission denied" in told
    return SandboxFailed(
        f"cannot start the command: {told.strip()[-500:]}", kind="spawn", again=False if refused else None
    )
