"""What a container reaches, by the network that it is in. What this machine serves beside is `fence.py`'s."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tests.container_image import IMAGE, NUMBERS, START, sandboxes
from tests.docker_daemon import Daemon
from tests.wait_bounds import stretch

from holdwater.core.records import Limits, Network, SandboxSpec

REFUSED = 1.0  # seconds: the packets of a connection that must not come about are dropped
CONNECT = """python3 -c "
import socket, sys
try:
    with socket.create_connection(('{host}', {port}), timeout={seconds}) as s: print(s.recv(9).decode())
except OSError as e: print('no:', e)
" """
ISOLATED = ("--internal", "--opt", "com.docker.network.bridge.enable_icc=false")


def connect(host: str, port: int, seconds: float) -> str:
    """Return the command that prints the greeting at this address, or `no:`."""
    return CONNECT.format(host=host, port=port, seconds=seconds)


@contextmanager
def network(daemon: Daemon, name: str, *options: str) -> Iterator[str]:
    """A network; the address of this machine in it."""
    daemon.docker("network", "create", *options, name)
    try:
        (told,) = json.loads(daemon.docker("network", "inspect", name))
        yield told["IPAM"]["Config"][0]["Gateway"]
    finally:
        daemon.docker("network", "rm", name)


@asynccontextmanager
async def greeting(daemon: Daemon, host: str) -> AsyncIterator[int]:
    """Someone who listens at this address and says hello; the port."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(greet, sock=daemon.listener(host)) as server:
        yield server.sockets[0].getsockname()[1]


async def test_the_gateway_is_reached_and_neither_neighbours_nor_the_world(netdaemon: Daemon) -> None:
    run = f"net{next(NUMBERS)}"
    name = f"holdwater-{run}"
    with network(netdaemon, name, *ISOLATED) as ours:
        async with (
            greeting(netdaemon, ours) as port,
            greeting(netdaemon, "127.0.0.1") as local,
            sandboxes(netdaemon, Network.GATEWAY, run=run) as boxes,
            boxes.open(1, Limits(), None, START) as box,
            boxes.open(2, Limits(), None, START) as neighbour,
        ):
            await neighbour.run("python3 -m http.server 8000 >/dev/null 2>&1 &")
            await neighbour.run(
                "until (echo > /dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.1; done", timeout=stretch(20)
            )
            (told,) = json.loads(netdaemon.docker("inspect", f"holdwater-{run}-2-1"))
            address = told["NetworkSettings"]["Networks"][name]["IPAddress"]
            places = ((ours, port), (address, 8000), ("127.0.0.1", local), ("192.0.2.1", 80))
            itself = await neighbour.run(f"echo > /dev/tcp/{address}/8000")
            said = {
                host: (await box.run(connect(host, at, stretch(10) if host == ours else REFUSED))).stdout
                for host, at in places
            }

    assert itself.ok, "the neighbour serves nothing"
    assert said.pop(ours) == "hello\n"
    assert all(one.startswith("no:") for one in said.values()), said


async def test_none_reaches_nothing_and_another_network_can_be_entered_and_left(netdaemon: Daemon) -> None:
    run = f"net{next(NUMBERS)}"
    with network(netdaemon, f"holdwater-{run}", *ISOLATED) as ours:
        async with greeting(netdaemon, ours) as port, sandboxes(netdaemon, Network.GATEWAY, run=run) as boxes:
            ask = connect(ours, port, REFUSED)
            async with boxes.open(1, Limits(), None, SandboxSpec(image=IMAGE, network=Network.NONE)) as box:
                before = await box.run(ask)
                await box.set_network(Network.GATEWAY)
                during = await box.run(connect(ours, port, stretch(10)))
                await box.set_network(Network.NONE)
                after = await box.run(ask)
                await box.renew()
                await box.set_network(Network.GATEWAY)
                anew = await box.run(ask)

    assert [told.stdout.strip()[:5] for told in (before, during, after, anew)] == [
        "no: [",
        "hello",
        "no: [",
        "hello",
    ]


async def test_open_reaches_what_the_machine_does(netdaemon: Daemon) -> None:
    run = f"net{next(NUMBERS)}"
    with network(netdaemon, f"holdwater-{run}-open") as ours, network(netdaemon, f"{run}-theirs") as theirs:
        async with (
            greeting(netdaemon, ours) as port,
            greeting(netdaemon, theirs) as other,
            sandboxes(netdaemon, Network.OPEN, run=run) as boxes,
            boxes.open(1, Limits(), None, START) as box,
        ):
            near = await box.run(connect(ours, port, stretch(10)))
            far = await box.run(connect(theirs, other, stretch(10)))

    assert (near.stdout, far.stdout) == ("hello\n", "hello\n")
