"""One container of an attempt: created and started, connected, held to another limit, restarted, removed.

`spec.py` says what the daemon is asked for; `startup.py` waits for what the image starts. A container has its
name from the beginning, so that it can be removed although the answer to its creation was lost.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from ...core.errors import SandboxFailed
from ...core.records import Network
from ...docker.client import DockerClient, DockerError
from .failures import gone, reported
from .spec import Wanted, body

MAKING = 120.0  # seconds for the daemon to make or start one: many at once wait for each other
ASKING = 30.0  # seconds for any other answer
RESTARTING = 30.0
NOT_FOUND = "127"  # a shell's status when there is no such program
LOOK_AGAIN = 0.05  # seconds between two looks at one that is being removed by another


class Container:
    """A container by its name."""

    def __init__(self, client: DockerClient, name: str, networks: dict[Network, str]) -> None:
        self.client = client
        self.name = name
        self.path = f"/containers/{name}"
        self.id = ""
        self.pid = 0  # of its first process, where the daemon is
        self.volumes: tuple[str, ...] = ()  # directories of the daemon's machine
        self.resolves = False  # names, by the daemon's resolver
        self._networks = networks
        self._network = Network.NONE
        self.started = 0.0  # not after it, by the daemon's clock

    async def create(self, wanted: Wanted, network: Network) -> None:
        """Make it; its files can be written before it is started."""
        asked = body(wanted)
        with reported("cannot make a container"):
            try:
                told = await self._created(asked)
            except DockerError as error:
                if error.status != 409:
                    raise
                await self.remove(ASKING)  # left by a worker that was killed at the same attempt
                told = await self._created(asked)
        self.id = told["Id"]
        self.resolves = wanted.resolves
        self._network = network
        self.started = time.time() - 1.0  # the daemon's clock may be another

    async def start(self) -> None:
        await self.client.post(f"{self.path}/start", seconds=MAKING)

    async def look(self) -> None:
        """See what it is like now that it runs."""
        told = await self.client.get(f"{self.path}/json", seconds=ASKING)
        self.pid = told["State"]["Pid"]
        self.volumes = tuple(one["Source"] for one in told["Mounts"] if one["Type"] == "volume")

    async def _created(self, asked: dict[str, Any]) -> Any:
        return await self.client.post("/containers/create", {"name": self.name}, asked, MAKING)

    async def reach(self, network: Network) -> None:
        """Leave the network that it is in, for another."""
        if network is self._network:
            return
        with reported("cannot connect a container with another network"):
            left, joined = self._networks[self._network], self._networks[network]
            body = {"Container": self.name, "Force": True}
            await self.client.post(f"/networks/{left}/disconnect", body=body, seconds=ASKING)
            await self.client.post(
                f"/networks/{joined}/connect", body={"Container": self.name}, seconds=ASKING
            )
        self._network = network

    async def allow(self, memory: int) -> None:
        """Change the limit on memory: both at once, as neither may pass the other."""
        body = {"Memory": memory, "MemorySwap": memory}
        await self.client.post(f"{self.path}/update", body=body, seconds=ASKING)

    async def running(self) -> bool:
        try:
            told = await self.client.get(f"{self.path}/json", seconds=ASKING)
        except DockerError as error:
            if gone(error):
                return False
            raise
        return bool(told["State"]["Running"])

    async def events(self, kind: str, since: float) -> list[dict[str, Any]]:
        """What of this kind happened to it, as far back as the daemon remembers."""
        filters = msgspec.json.encode({"container": [self.id], "event": [kind]}).decode()
        query = {"since": f"{since:.3f}", "until": f"{time.time():.3f}", "filters": filters}
        async with self.client.reading("GET", "/events", query, silence=ASKING) as pieces:
            told = b"".join([piece async for piece in pieces])  # bound: the daemon keeps 256 events
        return [msgspec.json.decode(line) for line in told.splitlines() if line.strip()]

    async def exit_code(self) -> str | None:
        """How its first process ended; None: it runs, as far as the daemon remembers."""
        told = await self.events("die", self.started)
        return str(told[-1].get("Actor", {}).get("Attributes", {}).get("exitCode", "")) if told else None

    async def ended_at_once(self) -> bool:
        """Whether its first process could not go on for want of a program."""
        try:
            return await self.exit_code() == NOT_FOUND
        except DockerError:
            return False

    async def population(self) -> int:
        """How many processes are in it, as the daemon's machine sees them."""
        told = await self.client.get(f"{self.path}/top", seconds=ASKING)
        return len(told["Processes"] or ())

    async def restart(self) -> None:
        """End everything in it, whatever it does: its files stay."""
        with reported("cannot end what runs in a container"):
            await self.client.post(f"{self.path}/restart", {"t": "0"}, seconds=RESTARTING)
            told = await self.client.get(f"{self.path}/json", seconds=ASKING)
        self.pid = told["State"]["Pid"]

    async def remove(self, seconds: float) -> None:
        """It is gone when this returns."""
        await remove(self.client, self.name, seconds)


async def remove(client: DockerClient, name: str, seconds: float) -> None:
    """Kill and remove a container, with the volumes that have no name; one that is gone is fine."""
    until = time.monotonic() + seconds
    while True:
        try:
            query = {"force": "true", "v": "true"}
            await client.delete(f"/containers/{name}", query, seconds=seconds)
            return
        except DockerError as error:
            if error.status == 404:
                return
            if error.status != 409 or time.monotonic() > until:  # else another is at it
                raise
        await asyncio.sleep(LOOK_AGAIN)


def no_sleep() -> SandboxFailed:
    return SandboxFailed(
        "the container ended as soon as it was started",
        "an image needs `sh` and `sleep` on its PATH",
        kind="missing",
        again=False,
    )
