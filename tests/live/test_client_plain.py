"""The client for plain code: from several threads, as an iterator, and under Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.faulty_server import hang, playing
from tests.wait_bounds import stretch

from holdwater.client import Client, Finished, Order, ServerGone
from holdwater.core.errors import BadInput

WAITING = """
import sys
from holdwater.client import Client, Order
with Client(sys.argv[1]) as client:
    if sys.argv[2] == "run":
        client.run("add-1", key="k")
    else:
        for event in client.stream(Order(key="k", instance="add-1")):
            pass
"""


def order(n: int) -> Order:
    return Order(key=f"k{n}", instance=f"add-{n}")


async def test_threads_share_a_client() -> None:
    def work(url: str) -> list[Any]:
        with Client(url) as client, ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda n: client.run(f"add-{n}").instance, range(40)))

    async with playing() as stage:
        found = await asyncio.to_thread(work, stage.url)

    assert found == [f"add-{n}" for n in range(40)]
    assert len(set(stage.posts)) == 40


async def test_map_gives_every_result_and_pulls_no_more_than_fits() -> None:
    ahead: list[int] = []

    def work(url: str) -> int:
        pulled = taken = 0

        def orders() -> Iterator[Order]:
            nonlocal pulled
            for n in range(50):
                pulled += 1
                yield order(n)

        with Client(url) as client:
            for _ in client.map(orders(), at_once=5):
                ahead.append(pulled - taken)
                taken += 1
        return taken

    async with playing() as stage:
        assert await asyncio.to_thread(work, stage.url) == 50

    assert max(ahead) <= 5
    assert stage.most <= 5


async def test_map_that_is_left_early_cancels_what_runs() -> None:
    def work(url: str) -> None:
        with Client(url) as client:
            results = client.map([order(0), order(1), order(2)], at_once=3)
            next(results)
            results.close()  # type: ignore[attr-defined]

    async with playing() as stage:
        stage.acts.extend([hang, hang])
        await asyncio.to_thread(work, stage.url)
        assert stage.deleted.qsize() == 2


async def test_a_stream_ends_with_its_result() -> None:
    def work(url: str) -> list[Any]:
        with Client(url) as client:
            return list(client.stream(order(1)))

    async with playing() as stage:
        told = await asyncio.to_thread(work, stage.url)

    assert isinstance(told[-1], Finished)
    assert stage.deleted.empty()


async def test_closing_cancels_what_other_threads_wait_for() -> None:
    caught: list[BaseException] = []

    async with playing(hang) as stage:
        client = Client(stage.url)

        def wait() -> None:
            try:
                client.run("add-1", key="k")
            except ServerGone as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        await stage.hanging.wait()
        await asyncio.to_thread(client.close)
        await asyncio.to_thread(waiting.join)
        assert stage.deleted.get_nowait() == "k"

    assert len(caught) == 1
    assert not any(thread.name == "holdwater-client" for thread in threading.enumerate())
    with pytest.raises(BadInput, match="closed"):
        client.health()


async def test_a_callback_that_would_wait_for_itself_is_refused() -> None:
    def work(url: str) -> None:
        with Client(url) as client:
            client.run("add-1", on_event=lambda event: client.health())

    async with playing() as stage:
        with pytest.raises(BadInput, match="the client's own"):
            await asyncio.to_thread(work, stage.url)


@pytest.mark.parametrize("what", ["run", "stream"])
async def test_ctrl_c_cancels_the_order(what: str) -> None:
    async with playing(hang) as stage:
        process = subprocess.Popen(
            [sys.executable, "-c", WAITING, stage.url, what], stderr=subprocess.PIPE, text=True
        )
        await stage.hanging.wait()
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate, timeout=stretch(20))
        assert stage.deleted.get_nowait() == "k"

    assert said.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT
