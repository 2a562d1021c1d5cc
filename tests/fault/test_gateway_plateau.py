"""Large requests through a gateway in its own process: nothing of them stays, and memory finds its level."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import SOURCE
from tests.wait_bounds import stretch

from holdwater.rollout.allocator import choose_settings

CONNECTIONS = 64
SIZE = 1_000_000  # bytes of a request
MESSAGE = 4_000  # bytes of one in its history
GROWTH = 0.02  # of the memory at rest: 3 KB for each of 200 requests
ROUNDS = 6
REPLY = b'{"choices":[{"message":{"role":"assistant","content":"so it is"}}],"usage":{"prompt_tokens":9}}'
GATEWAY = """
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from holdwater.gateway.server import Gateway
from holdwater.gateway.upstreams.http import HttpUpstream
from holdwater.ledger.directory import RunDirectory
from holdwater.ledger.exchanges import AttemptLog


def left(gateway, sessions):
    relay = gateway.relay
    return {
        "sessions": len(gateway.sessions),
        "calls": sum(len(session._calls) + len(session._unrecorded) for session in sessions),
        "admitted": relay.admission.used + len(relay.admission._waiting),
        "retained": relay.retention.used,
        "recorded": sum(session.exchanges for session in sessions),
    }


async def main(port, place):
    directory = RunDirectory(place)
    loop = asyncio.get_running_loop()
    attempt = 0
    async with (
        HttpUpstream(f"http://127.0.0.1:{port}/v1") as upstream,
        Gateway(upstream, place / "socket") as gateway,
    ):
        while count := int(await loop.run_in_executor(None, sys.stdin.readline) or 0):
            async with AsyncExitStack() as stack:
                sessions = []
                for _ in range(count):
                    attempt += 1
                    log = AttemptLog(directory, attempt)
                    stack.callback(log.close)
                    sessions.append(await stack.enter_async_context(gateway.open_session(attempt, log)))
                print(json.dumps([gateway.url, *(session.key for session in sessions)]), flush=True)
                await loop.run_in_executor(None, sys.stdin.readline)
            print(json.dumps(left(gateway, sessions)), flush=True)
            del sessions


uvloop.run(main(int(sys.argv[1]), Path(sys.argv[2])))
"""


async def test_two_hundred_large_requests_leave_nothing_behind(tmp_path: Path) -> None:
    await plateau(tmp_path, 200)


@pytest.mark.proof
async def test_two_thousand_large_requests_leave_nothing_behind(tmp_path: Path) -> None:
    await plateau(tmp_path, 2000)


async def at_rest(pid: int) -> int:
    """Bytes of a process that has nothing to do, when its allocator has given back what it does not need."""
    sizes = []
    for _ in range(10):
        await asyncio.sleep(0.2)
        sizes.append(anonymous_memory(pid))
    return min(sizes)


async def plateau(place: Path, count: int) -> None:
    """Play rounds until one adds next to nothing: the level depends on how many requests run at once."""
    resting: list[int] = []
    async with upstream() as port, gateway(place, port) as process:
        while len(resting) < 2 or (resting[-1] > resting[-2] * (1 + GROWTH) and len(resting) < ROUNDS):
            left = await requests(process, count)

            assert left == {"sessions": 0, "calls": 0, "admitted": 0, "retained": 0, "recorded": count}
            resting.append(await at_rest(process.pid))
    shown = [f"{size / 1e6:.1f} MB" for size in resting]
    assert resting[-1] <= resting[-2] * (1 + GROWTH), f"{count} requests more add to it each time: {shown}"
    assert resting[-1] < 160e6  # two and a half bodies for each connection would be that much alone


async def requests(process: asyncio.subprocess.Process, count: int) -> dict[str, int]:
    """So many requests by 64 agents at once, each with its session; what is left when all have gone."""
    url, *keys = await tell(process, CONNECTIONS)
    port = int(url.split(":")[2].split("/")[0])
    async with asyncio.TaskGroup() as group:
        for number, key in enumerate(keys):
            share = count // CONNECTIONS + (number < count % CONNECTIONS)
            group.create_task(agent(port, key, number, share))
    left: dict[str, int] = await tell(process, 0)
    return left


async def agent(port: int, key: str, number: int, turns: int) -> None:
    """A conversation that is large from its first turn and grows a little with each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    history = ",".join(said(f"{number}.{n} ") for n in range(SIZE // MESSAGE))
    for turn in range(turns):
        body = b'{"model":"m","messages":[%s]}' % history.encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer %s\r\n"
            b"Content-Length: %d\r\n\r\n" % (key.encode(), len(body))
        )
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        assert await reader.readexactly(length_in(head)) == REPLY
        history += "," + said(f"{number}/{turn} ")
    writer.close()
    await writer.wait_closed()


def said(text: str) -> str:
    return json.dumps({"role": "user", "content": text * (MESSAGE // len(text))})


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    """Reads each request to its end, keeps nothing of it, and answers."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                rest = length_in(head)
                while rest > 0:
                    rest -= len(await reader.read(rest))
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                    % (len(REPLY), REPLY)
                )
        except asyncio.IncompleteReadError:
            pass  # the gateway closed it
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=CONNECTIONS)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def gateway(place: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", GATEWAY, str(port), str(place)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **choose_settings(os.environ), "PYTHONPATH": str(SOURCE)},
    )
    try:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(stretch(10)):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def tell(process: asyncio.subprocess.Process, count: int) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"%d\n" % count)
    return json.loads(await process.stdout.readline())


def length_in(head: bytes) -> int:
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return int(fields[b"content-length"])


def anonymous_memory(pid: int) -> int:
    """Bytes of heap and stacks. Pss also grows when another Python ends: fewer processes share its pages."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
