"""The client and a real server, `holdwater serve`, in a process of its own: to the end, and through death."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.client import AsyncClient, PolicyCall

ROOT = Path(__file__).parents[2]
GUESSING = ROOT / "examples" / "guessing.py"


class Served:
    """A server that can be killed, and started again with its directory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.url = f"unix:{place}/s"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        words = ["serve", f"{GUESSING}:suite", "--agent", f"{GUESSING}:guess", "--workers", "1", "--quiet"]
        words += ["--listen", self.url, "--out", str(self.place / "run")]
        with (self.place / "log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "holdwater", *words, stdout=log, stderr=log
            )

    async def end(self, number: int) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()


@asynccontextmanager
async def served(place: Path) -> AsyncIterator[Served]:
    server = Served(place)
    await server.start()
    try:
        yield server
    finally:
        await server.end(signal.SIGKILL)


class Teller:
    """A policy that counts up, and can be made to wait."""

    def __init__(self) -> None:
        self.asked: list[int] = []  # how many messages each call had
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.waits = asyncio.Event()

    async def __call__(self, call: PolicyCall) -> str:
        turn = len(call.messages) // 2
        self.asked.append(turn)
        if turn == 1 and not self.goes_on.is_set():
            self.waits.set()
            await self.goes_on.wait()
        return str(turn + 1)


async def test_an_order_outlives_its_server_and_recorded_turns_are_not_asked_again(tmp_path: Path) -> None:
    teller = Teller()
    teller.goes_on.clear()
    async with (
        served(tmp_path) as server,
        AsyncClient(server.url, patience=30) as client,
        asyncio.TaskGroup() as tasks,
    ):
        order = tasks.create_task(client.run("red", policy=teller, key="k"))
        await teller.waits.wait()
        await server.end(signal.SIGKILL)
        await server.start()
        teller.goes_on.set()
        rollout = await order
        again = await client.run_group("green", 2, policy=teller)
        await client.drain()
        status = await server.end(0)

    assert (rollout.outcome, rollout.reward, rollout.answer) == ("failed", 0.5, 2)
    assert teller.asked.count(0) == 1 + 2, "the first turn of `red` was in the record"
    assert again.together and [one.reward for one in again.rollouts] == [0.0, 0.0]
    assert status == 0, (tmp_path / "log").read_text()


async def test_a_cancelled_client_leaves_nothing_open_on_the_server(tmp_path: Path) -> None:
    teller = Teller()
    teller.goes_on.clear()
    async with served(tmp_path) as server, AsyncClient(server.url) as client:
        tasks = [asyncio.create_task(client.run_group("blue", 4, policy=teller)) for _ in range(8)]
        await teller.waits.wait()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        async with asyncio.timeout(stretch(5)):
            while (stats := await client.stats()).running or stats.orders.get("open"):
                await asyncio.sleep(0.05)
        assert stats.held == 0
        assert stats.health.ok


@pytest.mark.parametrize(
    "way",
    [pytest.param([], id="held calls"), pytest.param(["--steer"], id="steered", marks=pytest.mark.proof)],
)
async def test_the_training_loop_gets_better(way: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples" / "rl_loop.py"),
        *way,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, said = await process.communicate()
    steps = re.findall(r"^ +(\d+) +([\d.]+)  (\d+)$", printed.decode(), re.MULTILINE)

    assert process.returncode == 0, said.decode()
    assert [step for step, _, _ in steps] == [version for _, _, version in steps]
    rewards = [float(reward) for _, reward, _ in steps]
    assert rewards[0] < 0.6 < max(rewards[-3:])
