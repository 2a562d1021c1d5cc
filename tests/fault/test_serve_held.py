"""A trainer that is the model itself: its answers reach whom they are for, whatever breaks in between."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from tests.server_harness import Server, eventually, kill, server
from tests.trainer_harness import SUITE, WAYS, Trainer, heard, line, said, talk, talks
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.client import (
    AnyOrderEvent,
    AsyncClient,
    CallAnswer,
    Called,
    Dropped,
    LimitOverrides,
    ModelChoice,
    ModelSource,
    OrderRefused,
    PolicyCall,
)
from holdwater.core.records import MiB

SIZES = [24, pytest.param(104, marks=pytest.mark.proof)]
SLOTS = 128
HELD = ModelChoice(source=ModelSource.TRAINER)
TRAINER = """
import asyncio, json, sys
from holdwater.client import AsyncClient, Instance

async def silent(call):
    await asyncio.sleep(3600)

async def main(url):
    instances = [Instance(**one) for one in json.load(sys.stdin)]
    async with AsyncClient(url) as client:
        await asyncio.gather(*(client.run(one, policy=silent) for one in instances))

asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--workers", "1", "--concurrency", str(SLOTS), "--ungoverned", "--grace", "2")
    with server(tmp_path_factory.mktemp("held"), *flags, suite=SUITE) as found:
        yield found


@asynccontextmanager
async def scene(serve: Server, url: str = "") -> AsyncIterator[AsyncClient]:
    await eventually((serve.out / "token").exists, 20.0, lambda: serve.said)
    async with AsyncClient(url or serve.url, serve.token if url else None, patience=20.0) as client:
        await serve.ready(client)
        yield client
        await eventually(lambda: idle(client), 10.0)


async def idle(client: AsyncClient) -> bool:
    stats = await client.stats()
    return (stats.held, stats.running, stats.orders["open"]) == (0, 0, 0)


async def held(client: AsyncClient, count: int) -> bool:
    return (await client.stats()).held == count


@pytest.mark.parametrize("size", SIZES)
async def test_each_of_many_calls_at_once_gets_its_own_answer(serving: Server, size: int) -> None:
    trainer = Trainer()
    async with scene(serving) as client:
        ways = talks(f"own-{size}", size)
        runs = {n: asyncio.create_task(client.run(talk(n, way), policy=trainer)) for n, way in ways.items()}
        await eventually(lambda: trainer.waiting == size, 30.0)
        assert await held(client, size)
        trainer.go.set()
        found = {name: heard(ways[name], await run) for name, run in runs.items()}

    assert found == {name: [f"to {name} 0"] for name in ways}
    assert set(trainer.asked.values()) == {1}


@pytest.mark.parametrize("size", SIZES)
async def test_a_trainer_that_is_killed_leaves_no_call_behind(serving: Server, size: int) -> None:
    instances = [talk(name, way) for name, way in talks(f"dies-{size}", size).items()]
    async with scene(serving) as client:
        before = (await client.stats()).rollouts.get("cancelled", 0)
        told = json.dumps([{"id": one.id, "data": one.data} for one in instances])
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, serving.url], stdin=subprocess.PIPE)
        assert trainer.stdin is not None
        trainer.stdin.write(told.encode())
        trainer.stdin.close()
        await eventually(lambda: held(client, size), 30.0)

        trainer.kill()
        trainer.wait()

        began = time.monotonic()
        await eventually(lambda: idle(client), 10.0)
        assert time.monotonic() - began < stretch(5.0)
        assert (await client.stats()).rollouts["cancelled"] - before == size


@pytest.mark.parametrize("size", SIZES)
async def test_an_answer_after_the_end_of_its_attempt_is_refused(serving: Server, size: int) -> None:
    """Some time out while they are being graded, others wait on: what is late is told so."""
    (serving.place / "graded").unlink(missing_ok=True)
    trainer, dropped, calls = Trainer(), Counter[str](), dict[str, str]()

    def event(name: str) -> Callable[[AnyOrderEvent], None]:
        def tell(event: AnyOrderEvent) -> None:
            if isinstance(event, Called):
                calls[name] = event.call
            dropped[name] += isinstance(event, Dropped)

        return tell

    async with scene(serving) as client:
        late, others = talks(f"late-{size}", size // 2), talks(f"others-{size}", size // 2)
        waiting = {n: asyncio.create_task(client.run(talk(n, w), policy=trainer)) for n, w in others.items()}
        ended = {
            n: asyncio.create_task(
                client.run(
                    talk(n, w, slow=True),
                    policy=trainer,
                    on_event=event(n),
                    key=n,
                    limits=LimitOverrides(acting=stretch(1.0)),
                )
            )
            for n, w in late.items()
        }
        await eventually(lambda: trainer.asked.total() == size, 30.0)
        await eventually(lambda: dropped.total() == len(late), 30.0)
        for name, call in calls.items():
            with pytest.raises(OrderRefused) as refused:
                await client.answer(name, CallAnswer(call=call, text="too late"))
            assert refused.value.code == "gone"
        (serving.place / "graded").touch()
        rollouts = [await run for run in ended.values()]
        trainer.go.set()
        found = {name: heard(others[name], await run) for name, run in waiting.items()}

    assert set(dropped.values()) == {1} and dropped.keys() == late.keys()
    assert {rollout.failure and rollout.failure.kind for rollout in rollouts} == {"timeout"}
    assert {rollout.failure and rollout.failure.where for rollout in rollouts} == {"limit"}
    assert found == {name: [f"to {name} 0"] for name in others}


@pytest.mark.parametrize("size", SIZES)
async def test_a_kill_of_a_worker_with_held_calls_repeats_no_answered_turn(
    serving: Server, size: int
) -> None:
    first, second = Trainer(), Trainer()
    first.go.set()

    async def trainer(call: PolicyCall) -> str:
        return await (second if said(call).endswith(" 1") else first)(call)

    async with scene(serving) as client:
        ways = talks(f"killed-{size}", size)
        runs = {
            n: asyncio.create_task(client.run(talk(n, way, turns=3), policy=trainer))
            for n, way in ways.items()
        }
        await eventually(lambda: second.waiting == size, 30.0)
        kill(serving.workers()[0])
        await eventually(lambda: second.asked.total() == 2 * size, 30.0)
        second.go.set()
        found = {name: heard(ways[name], await run) for name, run in runs.items()}

    assert found == {name: [f"to {name} {turn}" for turn in range(3)] for name in ways}
    assert set(first.asked.values()) == {1} and len(first.asked) == 2 * size
    assert set(second.asked.values()) == {2}


@pytest.mark.proof
async def test_workers_that_are_recycled_with_calls_held_lose_none(tmp_path: Path) -> None:
    """More drain than may: those that wait longest go on elsewhere, and are asked nothing again."""
    first, second = Trainer(), Trainer()
    first.go.set()

    async def trainer(call: PolicyCall) -> str:
        return await (second if "long" in said(call) and said(call).endswith(" 1") else first)(call)

    flags = ("--workers", "1", "--recycle-after", "12", "--concurrency", "40", "--ungoverned")
    with server(tmp_path, *flags, suite=SUITE) as serve:
        async with serve.client() as client:
            await serve.ready(client)
            long = talks("long", 16)
            runs = {n: client.run(talk(n, way, turns=3), policy=trainer) for n, way in long.items()}
            waiting = {name: asyncio.create_task(run) for name, run in runs.items()}
            await eventually(lambda: second.waiting == len(long), 30.0)
            while (stats := await client.stats()).recycled < 4:
                name = f"short-{first.asked.total()}"
                assert heard(WAYS[0], await client.run(talk(name, WAYS[0]), policy=trainer)) == [
                    f"to {name} 0"
                ]
            await eventually(lambda: second.asked.total() >= 2 * len(long), 30.0)
            second.go.set()
            found = {name: heard(long[name], await run) for name, run in waiting.items()}

    assert stats.lost == 0
    assert found == {name: [f"to {name} {turn}" for turn in range(3)] for name in long}
    assert set(first.asked.values()) == {1}


@pytest.mark.proof
async def test_a_server_that_is_killed_with_calls_held_asks_only_those_again(tmp_path: Path) -> None:
    first, second = Trainer(), Trainer()
    first.go.set()

    async def trainer(call: PolicyCall) -> str:
        return await (second if said(call).endswith(" 1") else first)(call)

    with server(tmp_path, "--workers", "1", "--concurrency", "104", "--ungoverned", suite=SUITE) as serve:
        async with serve.client() as client:
            await serve.ready(client)
            ways = talks("left", 104)
            runs = {
                n: asyncio.create_task(client.run(talk(n, way, turns=3), policy=trainer))
                for n, way in ways.items()
            }
            await eventually(lambda: second.waiting == len(ways), 30.0)
            serve.kill()
            serve.start()
            await eventually(lambda: second.asked.total() == 2 * len(ways), 60.0)
            second.go.set()
            found = {name: heard(ways[name], await run) for name, run in runs.items()}

    assert found == {name: [f"to {name} {turn}" for turn in range(3)] for name in ways}
    assert set(first.asked.values()) == {1}


@pytest.mark.parametrize("size", SIZES)
async def test_a_client_whose_connections_break_comes_back_and_answers(serving: Server, size: int) -> None:
    trainer = Trainer()
    async with line(serving) as (url, cut), scene(serving, url) as client:
        ways = talks(f"broken-{size}", size)
        runs = {
            n: asyncio.create_task(client.run(talk(n, way, turns=2), policy=trainer))
            for n, way in ways.items()
        }
        await eventually(lambda: trainer.waiting == size, 30.0)
        cut()
        trainer.go.set()
        found = {name: heard(ways[name], await run) for name, run in runs.items()}

    assert found == {name: [f"to {name} {turn}" for turn in range(2)] for name in ways}
    assert set(trainer.asked.values()) == {1}


@pytest.mark.parametrize("size", SIZES)
async def test_a_group_as_large_as_can_be_is_answered_by_its_trainer(serving: Server, size: int) -> None:
    trainer = Trainer()
    trainer.go.set()
    async with scene(serving) as client:
        result = await client.run_group(talk(f"group-{size}", WAYS[0], turns=2), size, policy=trainer)

    assert {rollout.outcome for rollout in result.rollouts} == {"passed"}
    assert set(trainer.asked.values()) == {size}


@pytest.mark.parametrize("size", SIZES)
async def test_what_was_handed_to_the_trainer_is_not_kept_while_it_thinks(serving: Server, size: int) -> None:
    """Images of 1 MB: the agents read them from a file as they send them."""
    for n in range(size):
        (serving.place / f"image-{n}").write_bytes(image(n))
    trainer = Trainer()
    async with scene(serving) as client:
        (worker,) = map(psutil.Process, serving.workers())
        before = worker.memory_info().rss
        runs = [asyncio.create_task(client.run(shown(n, size), policy=trainer)) for n in range(size)]
        await eventually(lambda: trainer.waiting == size, 60.0)
        # What was sent and freed goes back to the kernel within a moment.
        grown = lambda: worker.memory_info().rss - before  # noqa: E731
        await eventually(lambda: grown() < size * MiB / 2, 10.0, lambda: f"{grown() / MiB:.0f} MiB more")
        trainer.go.set()
        rollouts = [await run for run in runs]

    assert {rollout.outcome for rollout in rollouts} == {"passed"}


def image(number: int) -> bytes:
    data = base64.b64encode(os.urandom(MiB * 3 // 4)).decode()
    url = {"url": f"data:image/png;base64,{data}"}
    content = [{"type": "text", "text": f"image {number}"}, {"type": "image_url", "image_url": url}]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def shown(number: int, size: int) -> hw.Instance:
    requests = [["/v1/chat/completions", f"@image-{number}", {}]]
    return hw.Instance(id=f"shown-{size}-{number}", data={"requests": requests})
