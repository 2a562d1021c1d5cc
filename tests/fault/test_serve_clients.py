"""Clients that are killed, or slow, or ask for too much: their work goes, and the server stays flat."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.server_harness import Server, eventually, model, server
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.client import AsyncClient, ServerBusy
from holdwater.core.records import Instance
from holdwater.core.serving_protocol import Order, ServerStats

LARGE = 7_000_000  # characters: more than the kernel takes for someone who does not read
SIZES = [60, pytest.param(500, marks=pytest.mark.proof)]
TRAINER = """
import asyncio, sys
from holdwater.client import AsyncClient

async def main(url, count):
    async with AsyncClient(url) as client:
        await asyncio.gather(*(client.run(f"i{n % 8}") for n in range(count)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def trainer(serve: Server, count: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAINER, serve.url, str(count)])


@pytest.mark.parametrize("size", SIZES)
async def test_what_a_killed_client_had_ordered_is_cancelled_and_freed_within_seconds(
    tmp_path: Path, size: int
) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1", "--concurrency", "8")
        with server(tmp_path, *flags) as serve:
            async with serve.client() as client:
                await serve.ready(client)
                upstream.gate.clear()
                killed = trainer(serve, size)
                await eventually(lambda: opened(client, size), 30.0)
                await eventually(lambda: upstream.waiting == 8, 20.0)

                killed.kill()
                killed.wait()
                began = time.monotonic()
                await eventually(lambda: opened(client, 0), 10.0)
                seconds = time.monotonic() - began
                await eventually(lambda: upstream.waiting == 0, 5.0)
                stats = await client.stats()
                upstream.gate.set()
                other = await client.run("i0")
        audit = hw.audit(serve.out)

    assert seconds < stretch(5.0)
    assert (stats.running, stats.health.waiting, stats.held) == (0, 0, 0)
    assert stats.rollouts == {"cancelled": size}
    assert other.outcome == "passed"
    assert (audit.planned, audit.settled, audit.lost) == (size + 1, size + 1, 0)


async def opened(client: AsyncClient, orders: int) -> bool:
    stats: ServerStats = await client.stats()
    return stats.orders["open"] == orders


async def test_a_client_that_exceeds_the_queue_is_refused_as_busy(
    tmp_path: Path,
) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1", "--queue", "4")
        with server(tmp_path, *flags) as serve:
            async with serve.client(busy="raise") as client, serve.client() as patient:
                await serve.ready(client)
                upstream.gate.clear()
                runs = [asyncio.create_task(patient.run(f"i{n}")) for n in range(4)]
                await eventually(lambda: opened(client, 4), 20.0)

                with pytest.raises(ServerBusy, match="4 rollouts are open, the limit is 4"):
                    await client.run("i7")
                waits = asyncio.create_task(patient.run("i7"))
                await eventually(lambda: refused(client), 20.0)
                upstream.gate.set()
                rollouts = [await run for run in (*runs, waits)]

    assert {rollout.outcome for rollout in rollouts} == {"passed"}


async def refused(client: AsyncClient) -> bool:
    return (await client.stats()).orders.get("refused.busy", 0) >= 2


@pytest.mark.parametrize("size", [4, pytest.param(12, marks=pytest.mark.proof)])
async def test_clients_that_read_nothing_are_refused_eventually_and_cost_no_memory(
    tmp_path: Path, size: int
) -> None:
    """Results of 7 MB that nobody reads: they stay on disk, and what may be open at once is bounded."""
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1", "--queue", str(size))
        with ExitStack() as silent, server(tmp_path, *flags) as serve:
            async with serve.client() as client:
                await serve.ready(client)
                await asyncio.gather(*(client.run(large(n)) for n in range(2)))
                process = psutil.Process(serve.process.pid if serve.process else 0)
                before = process.memory_info().rss
                for n in range(size):
                    silent.enter_context(await asyncio.to_thread(deaf, serve, large(n), f"deaf-{n}"))
                await eventually(lambda: passed(client, size + 2), 60.0)
                bound = before + size * LARGE / 2
                await eventually(lambda: process.memory_info().rss < bound, 10.0)  # results are being written
                async with serve.client(busy="raise") as another:
                    with pytest.raises(ServerBusy):
                        await another.run("i1")
                silent.close()
                await eventually(lambda: opened(client, 0), 20.0)
                late = await client.result("deaf-0")

    assert late is not None and late.rollouts[0].outcome == "passed"


def large(number: int) -> Instance:
    return Instance(id=f"large-{number}", instruction=f"{number} " + "x" * LARGE, data={"turns": 1})


async def passed(client: AsyncClient, count: int) -> bool:
    return (await client.stats()).rollouts.get("passed", 0) >= count


def deaf(serve: Server, instance: Instance, key: str) -> socket.socket:
    """An order by someone who never reads an answer."""
    host, port = serve.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((host, int(port)))
    body = msgspec.msgpack.encode(Order(key=key, instance=instance))
    head = (
        f"POST /v1/orders HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/msgpack\r\n"
        f"Authorization: Bearer {serve.token}\r\n"
        f"Accept: application/msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection
