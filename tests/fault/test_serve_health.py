"""What a server says of its workers while they die, cannot start, compute or hang: the truth, and at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.server_harness import SUITE, Model, Server, eventually, kill, model, server
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.client import AsyncClient, ModelChoice, ModelSource, Order, Rollout, ServerHealth, Started

SLOW_START = """
import pathlib, time

while pathlib.Path(__file__).with_name("hold").exists():
    time.sleep(0.01)  # a fast machine would replace a worker before anybody sees that it is gone
"""
SILENCE = 2.5  # seconds
COMPUTING = 20.0


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--workers", "2", "--least-workers", "2", "--concurrency", "8", "--silence", str(SILENCE))
    with server(tmp_path_factory.mktemp("health"), *flags, suite=SLOW_START + SUITE) as found:
        yield found


class Seen(NamedTuple):
    """What the server said, and how many of its workers lived: the most of before and after."""

    health: ServerHealth
    living: int


def living(serve: Server) -> set[int]:
    """The workers that are alive as processes: a server has no other children."""
    assert serve.process is not None
    return {child.pid for child in psutil.Process(serve.process.pid).children() if not dead(child.pid)}


def dead(pid: int) -> bool:
    """Whether nothing of it is left but its name: its first thread may be gone before the others."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return "\nState:\tZ" in status and "\nThreads:\t1\n" in status


async def watched(serve: Server, client: AsyncClient, seen: list[Seen]) -> None:
    while True:
        before = living(serve)
        health = await client.health()
        seen.append(Seen(health, len(before | living(serve))))
        await asyncio.sleep(0.005)


async def run(client: AsyncClient, upstream: Model, name: str, **data: object) -> Rollout:
    instance = hw.Instance(id=name, instruction=name, data={"turns": 1, **data})
    return await client.run(instance, model=endpoint(upstream), key=name)


def endpoint(upstream: Model) -> ModelChoice:
    return ModelChoice(source=ModelSource.ENDPOINT, url=upstream.url, name="m")


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.proof)])
async def test_a_killed_worker_is_never_reported_as_ready(serving: Server, times: int) -> None:
    seen: list[Seen] = []
    hold = serving.place / "hold"
    async with serving.client() as client:
        await serving.ready(client, workers=2)
        watch = asyncio.create_task(watched(serving, client, seen))
        for _ in range(times):
            await eventually(lambda: bool(seen) and seen[-1].health.ready == 2, 20.0)
            hold.touch()
            kill(min(living(serving)))
            await eventually(lambda: seen[-1].health.ready == 1, 5.0)
            hold.unlink()
        await eventually(lambda: seen[-1].health.ready == 2, 20.0)
        watch.cancel()

    assert [one for one in seen if one.health.ready > one.living] == []
    assert {one.health.ok for one in seen} == {True}
    states = {(one.health.state, one.health.ready) for one in seen}
    assert states == {("serving", 2), ("degraded", 1)}


async def test_a_worker_that_cannot_start_is_reported_soon_while_another_serves(
    serving: Server,
) -> None:
    suite = serving.place / "command_runner.py"
    async with model() as upstream, serving.client() as client:
        await serving.ready(client, workers=2)
        suite.write_text("def broken(:\n")
        try:
            kill(min(living(serving)))
            began = time.monotonic()
            await eventually(lambda: tells(client, "cannot be started"), 20.0)
            seconds = time.monotonic() - began
            health = await client.health()
            meanwhile = await run(client, upstream, "meanwhile")
        finally:
            suite.write_text(SLOW_START + SUITE)
        await serving.ready(client, workers=2)
        after = await client.health()

    assert seconds < stretch(5.0)
    assert (health.ok, health.state, health.ready, health.wanted) == (True, "degraded", 1, 2)
    assert "command_runner.py" in health.reason
    assert meanwhile.outcome == "passed"
    assert (after.state, after.reason) == ("serving", "")


async def tells(client: AsyncClient, reason: str) -> bool:
    return reason in (await client.health()).reason


@pytest.mark.proof
async def test_an_agent_that_holds_the_interpreter_costs_no_other_rollout(serving: Server) -> None:
    """Smaller, and at the level of the fleet, in `test_fleet_supervision.py`; as what follows."""
    async with model() as upstream, serving.client() as client:
        await serving.ready(client, workers=2)
        lost = (await client.stats()).lost
        names = [f"beside-{n}" for n in range(4)]
        beside = [asyncio.create_task(run(client, upstream, name, turns=3, pause=0.2)) for name in names]
        busy = await run(client, upstream, "busy", compute=COMPUTING)
        others = [await one for one in beside]
        stats = await client.stats()

    assert busy.outcome == "passed" and busy.times.acting > COMPUTING - 0.5
    assert {other.outcome for other in others} == {"passed"}
    assert stats.lost == lost
    assert set(upstream.asked.values()) == {1}


@pytest.mark.proof
async def test_a_loop_that_sleeps_forever_is_found_and_its_rollouts_continue(serving: Server) -> None:
    async with model() as upstream, serving.client() as client:
        await serving.ready(client, workers=2)
        names = [f"innocent-{n}" for n in range(4)]
        beside = [asyncio.create_task(run(client, upstream, name, turns=4, pause=0.3)) for name in names]
        asleep = Order(
            key="asleep",
            instance=hw.Instance(id="asleep", instruction="asleep", data={"end": "hang"}),
            model=endpoint(upstream),
        )
        async with client.stream(asleep) as events:
            began = time.monotonic()
            tries = 0
            async for event in events:
                tries += isinstance(event, Started)
                if tries == 2:
                    break  # and the order is cancelled, whose worker does not hear of anything
        seconds = time.monotonic() - began
        others = [await one for one in beside]
        await eventually(lambda: over(client, "asleep"), 10.0)
        result = await client.result("asleep")

    assert seconds < stretch(SILENCE + 5.0)
    assert {other.outcome for other in others} == {"passed"}
    assert result is not None and result.rollouts[0].outcome == "cancelled"


async def over(client: AsyncClient, key: str) -> bool:
    return await client.result(key) is not None


@pytest.mark.proof
async def test_a_rollout_that_blocks_every_loop_gets_a_verdict_in_the_end(serving: Server) -> None:
    async with model() as upstream, serving.client() as client:
        await serving.ready(client, workers=2)
        beside = [
            asyncio.create_task(run(client, upstream, f"near-{n}", turns=4, pause=0.3)) for n in range(6)
        ]
        culprit = await run(client, upstream, "culprit", end="hang")
        others = [await one for one in beside]

    assert culprit.failure is not None
    assert (culprit.failure.where, culprit.failure.kind, culprit.reward) == ("worker", "poison", None)
    assert {other.outcome for other in others} == {"passed"}
