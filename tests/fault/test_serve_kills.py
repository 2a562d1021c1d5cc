"""Workers and servers that are killed while trainers wait: every rollout comes back, once, and paid once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.server_harness import eventually, kill, model, server

import holdwater as hw
from holdwater.core.records import Instance
from holdwater.core.serving_protocol import Order, Rollout, ServerHealth

SIZES = [16, pytest.param(64, marks=pytest.mark.proof)]
TURNS = 4


def instance(number: int, **data: object) -> Instance:
    return Instance(id=f"own-{number}", instruction=f"own task {number}", data={"turns": TURNS, **data})


@pytest.mark.parametrize("size", SIZES)
async def test_a_killed_worker_costs_no_rollout_and_pays_no_turn_twice(tmp_path: Path, size: int) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "2", "--least-workers", "2")
        # What is declared need not be learned first: all run at once.
        with server(tmp_path, *flags, "--concurrency", str(size), "--sandbox-memory", "64MiB") as serve:
            async with serve.client() as client:
                await serve.ready(client, workers=2)
                told: list[ServerHealth] = []
                watch = asyncio.create_task(watched(client, told))
                upstream.gate.clear()
                runs = [
                    asyncio.create_task(client.run(instance(n, pause=0.05), key=f"k{n}")) for n in range(size)
                ]
                await eventually(lambda: upstream.waiting == size, 40.0)  # all are in their first turn
                await upstream.release()
                await eventually(lambda: upstream.waiting == size, 20.0)
                kill(serve.workers()[0])
                await eventually(lambda: any(health.ready < 2 for health in told), 20.0)
                upstream.gate.set()
                rollouts: list[Rollout] = [await run for run in runs]
                await eventually(lambda: told[-1].ready == 2, 20.0)
                watch.cancel()
            status = serve.process and serve.stop()
        audit = hw.audit(tmp_path / "run")

    assert {rollout.outcome for rollout in rollouts} == {"passed"}
    assert sorted(rollout.instance.split("@")[0] for rollout in rollouts) == sorted(
        f"own-{n}" for n in range(size)
    )
    again = {asked: count for asked, count in upstream.asked.items() if count > 1}
    assert 0 < len(again) <= size and set(again.values()) == {2}
    assert len(upstream.asked) == size * TURNS
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (size, size, 0, 0)
    assert status in (0, 3)


async def watched(client: object, told: list[ServerHealth]) -> None:
    """What the server says of itself, all the time."""
    while True:
        told.append(await client.health())  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", SIZES)
async def test_a_killed_server_continues_and_sends_nothing_twice_as_new(tmp_path: Path, size: int) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1", "--concurrency", str(size))
        with server(tmp_path, *flags, "--sandbox-memory", "64MiB") as serve:
            async with serve.client() as client:
                await serve.ready(client)
                first = await client.order(Order(key="early", instance="i0"))
                upstream.gate.clear()
                runs = [asyncio.create_task(client.run(instance(n), key=f"k{n}")) for n in range(size)]
                await eventually(lambda: upstream.waiting == size, 40.0)
                await upstream.release()
                await eventually(lambda: upstream.waiting == size, 20.0)  # all are in their second turn
                serve.kill()
                upstream.gate.set()
                serve.start()
                rollouts = [await run for run in runs]
                again = await client.order(Order(key="early", instance="i0"))
                unfinished = await client.result("k0")
        audit = hw.audit(tmp_path / "run")

    assert {rollout.outcome for rollout in rollouts} == {"passed"}
    assert (first.new, again.new) == (True, False)
    assert again.rollouts == first.rollouts
    assert unfinished is not None and unfinished.new is False
    twice = {asked: count for asked, count in upstream.asked.items() if count > 1}
    assert set(twice.values()) == {2}  # what was on its way is asked again, and nothing else
    assert len(twice) == size and all(asked.count("|") == 2 for asked in twice)
    assert (audit.planned, audit.settled, audit.lost, audit.duplicated) == (size + 1, size + 1, 0, 0)


async def test_an_order_without_a_returning_client_after_a_kill_is_reported_cancelled(tmp_path: Path) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1", "--return-grace", "0.5")
        with server(tmp_path, *flags) as serve:
            async with serve.client() as client:
                await serve.ready(client)
                upstream.gate.clear()
                run = asyncio.create_task(client.run("i1", key="lost"))
                await eventually(lambda: upstream.waiting == 1, 20.0)
                serve.kill()
                run.cancel()
                await asyncio.wait([run])
            serve.start()
            async with serve.client() as client:
                await serve.ready(client)

                async def settled() -> bool:
                    return await client.result("lost") is not None

                await eventually(settled, 10.0)
                result = await client.result("lost")
                upstream.gate.set()

    assert result is not None
    failure = result.rollouts[0].failure
    assert failure is not None and (failure.where, failure.kind) == ("cancelled", "client")


async def test_a_detached_order_goes_on_after_a_kill_without_its_client(tmp_path: Path) -> None:
    async with model() as upstream:
        flags = ("--model", "m", "--base-url", upstream.url, "--workers", "1")
        with server(tmp_path, *flags) as serve:
            async with serve.client() as client:
                await serve.ready(client)
                upstream.gate.clear()
                run = asyncio.create_task(client.run("i1", key="alone", detached=True))
                await eventually(lambda: upstream.waiting == 1, 20.0)
                serve.kill()
                run.cancel()
                await asyncio.wait([run])
            upstream.gate.set()
            serve.start()
            async with serve.client() as client:
                await serve.ready(client)

                async def settled() -> bool:
                    return await client.result("alone") is not None

                await eventually(settled, 20.0)
                result = await client.result("alone")

    assert result is not None and [rollout.outcome for rollout in result.rollouts] == ["passed"]
