"""The client against a server that fails: nothing runs twice, nothing is lost, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.faulty_server import Connection, Play, Stage, cut, finish, hang, playing, refusing
from tests.wait_bounds import stretch

from holdwater.client import (
    Accepted,
    AccessRefused,
    AsyncClient,
    Finished,
    Instance,
    Order,
    OrderRefused,
    ServerBusy,
    ServerGone,
    Started,
)
from holdwater.core.serving_protocol import ProblemDetails

BUSY = refusing(429, ProblemDetails(code="busy", message="the queue is full", after=0.15))


async def cut_at_once(connection: Connection) -> web.StreamResponse:
    return cut(connection)


async def cut_after_events(connection: Connection) -> web.StreamResponse:
    connection.stage.begun[connection.order.key] = 1
    await connection.tell(Accepted(order=1), Started(member=0, attempt=1))
    return cut(connection)


async def end_early(connection: Connection) -> web.StreamResponse:
    await connection.tell(Accepted(order=1))
    return web.Response()  # the stream that was begun ends as if all had been said


async def half_a_frame(connection: Connection) -> web.StreamResponse:
    await connection.tell(Accepted(order=1))
    await connection.write((1000).to_bytes(4, "big") + b"half")
    return cut(connection)


async def garbage(connection: Connection) -> web.StreamResponse:
    await connection.write(b"\x00\x00\x00\x04oops")
    return await connection.finish()


async def huge(connection: Connection) -> web.StreamResponse:
    await connection.write(b"\xff\xff\xff\xff" + b"x" * 100)
    return await connection.finish()


async def a_web_page(connection: Connection) -> web.StreamResponse:
    return web.Response(text="<html>", content_type="text/html")


def unready(code: str) -> Play:
    return refusing(503, ProblemDetails(code=code, message="not now"))


FAULTS: dict[str, Play] = {
    "cut at once": cut_at_once,
    "cut after events": cut_after_events,
    "ended early": end_early,
    "half a frame": half_a_frame,
    "garbage": garbage,
    "huge": huge,
    "a web page": a_web_page,
    "broken": unready("broken"),
    "starting": unready("starting"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_costs_a_connection_and_nothing_else(fault: str) -> None:
    async with playing(FAULTS[fault], FAULTS[fault]) as stage, AsyncClient(stage.url) as client:
        rollout = await client.run("add-1")

    assert rollout.reward == 1.0
    assert len(stage.posts) == 3
    assert list(stage.begun.values()) == [1], "the key was the same each time"


async def test_a_server_restarted_on_its_port_gets_the_same_key() -> None:
    async with playing(hang) as stage, AsyncClient(stage.url) as client, asyncio.TaskGroup() as tasks:
        order = tasks.create_task(client.run_group("add-1", 4, key="step 1/group 2"))
        await stage.hanging.wait()
        await stage.stop()
        await stage.start()
        result = await order

    assert stage.posts == ["step 1/group 2"] * 2
    assert result.together and len(result.rollouts) == 4


async def test_a_server_that_says_nothing_for_too_long_is_asked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdwater.client.server_connection.SILENCE", stretch(0.05))
    async with playing(hang) as stage, AsyncClient(stage.url) as client:
        assert (await client.run("add-1")).outcome == "passed"

    assert len(stage.posts) == 2 and len(set(stage.posts)) == 1


async def test_busy_is_waited_for_beyond_all_patience() -> None:
    acts = [cut_at_once, BUSY, BUSY, BUSY, cut_at_once]
    async with playing(*acts) as stage, AsyncClient(stage.url, patience=0.3) as client:
        began = time.monotonic()
        await client.run("add-1")

    assert len(stage.posts) == 6
    assert time.monotonic() - began >= 0.45


async def test_busy_is_raised_where_that_is_asked_for() -> None:
    async with playing(BUSY) as stage, AsyncClient(stage.url, busy="raise") as client:
        with pytest.raises(ServerBusy) as busy:
            await client.run("add-1")

    assert busy.value.after == 0.15


async def test_patience_ends_where_no_server_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        async with AsyncClient(url, patience=0.3) as client:
            began = time.monotonic()
            with pytest.raises(ServerGone, match=url):
                await client.run("add-1")
            assert 0.3 <= time.monotonic() - began < stretch(2)
            with pytest.raises(ServerGone):
                await client.health()


async def test_a_client_that_is_closed_says_so() -> None:
    async with playing(otherwise=cut_at_once) as stage:
        async with AsyncClient(stage.url) as client:
            order = asyncio.create_task(client.run("add-1"))
            while not stage.posts:
                await asyncio.sleep(0.001)
        with pytest.raises(ServerGone, match="the client is closed"):
            await order


async def test_what_talks_nonsense_for_good_is_no_server() -> None:
    async with playing(otherwise=huge) as stage, AsyncClient(stage.url) as client:
        with pytest.raises(ServerGone, match="an event of 4294967295 bytes"):
            await client.run("add-1")


@pytest.mark.parametrize(("status", "code"), [(400, "invalid"), (409, "conflict"), (503, "draining")])
async def test_a_refused_order_is_not_sent_again(status: int, code: str) -> None:
    refuse = refusing(status, ProblemDetails(code=code, message="no", hint="never"))
    async with playing(refuse) as stage, AsyncClient(stage.url) as client:
        with pytest.raises(OrderRefused, match="no") as refused:
            await client.run("add-1")

    assert refused.value.code == code
    assert len(stage.posts) == 1


async def test_a_wrong_key_is_said_at_once() -> None:
    async with playing() as stage, AsyncClient(stage.url, "wrong") as wrong:
        stage.key = "right"
        with pytest.raises(AccessRefused):
            await wrong.run("add-1")
        async with AsyncClient(stage.url, "right") as right:
            assert (await right.run("add-1")).outcome == "passed"


async def test_a_cancelled_order_is_cancelled_on_the_server() -> None:
    async with playing(hang) as stage, AsyncClient(stage.url) as client, asyncio.TaskGroup() as tasks:
        order = tasks.create_task(client.run("add-1", key="a/b?c"))
        await stage.hanging.wait()
        order.cancel()
        with pytest.raises(asyncio.CancelledError):
            await order
        assert stage.deleted.get_nowait() == "a/b?c"
        await stage.left.wait()


async def test_a_cancelled_client_that_waits_for_a_detached_order_leaves_it_alone() -> None:
    async with playing(hang) as stage, AsyncClient(stage.url) as client, asyncio.TaskGroup() as tasks:
        order = tasks.create_task(client.run("add-1", detached=True))
        await stage.hanging.wait()
        order.cancel()
        with pytest.raises(asyncio.CancelledError):
            await order
        await stage.left.wait()
        assert stage.deleted.empty()


async def left_in_a_block(client: AsyncClient, order: Order) -> None:
    async with client.stream(order) as events:
        async for event in events:
            if isinstance(event, Started):
                break


async def left_in_a_loop(client: AsyncClient, order: Order) -> None:
    async for event in client.stream(order):
        if isinstance(event, Started):
            break


@pytest.mark.parametrize("leave", [left_in_a_block, left_in_a_loop])
async def test_a_stream_that_is_left_early_cancels_its_order(leave: Any) -> None:
    async with playing(hang) as stage, AsyncClient(stage.url) as client:
        await leave(client, Order(key="k", instance="add-1"))
        assert await stage.deleted.get() == "k"
        await stage.left.wait()


async def test_a_stream_that_is_read_to_its_end_cancels_nothing() -> None:
    async with playing() as stage, AsyncClient(stage.url) as client:
        told = [type(event) async for event in client.stream(Order(key="k", instance="add-1"))]

    assert told == [Accepted, Started, Finished]
    assert stage.deleted.empty()


async def test_what_an_observer_raises_ends_its_order() -> None:
    def observe(event: object) -> None:
        raise ZeroDivisionError

    async with playing(hang) as stage, AsyncClient(stage.url) as client:
        with pytest.raises(ZeroDivisionError):
            await client.run("add-1", key="k", on_event=observe)
        assert stage.deleted.get_nowait() == "k"


async def test_no_more_orders_are_in_flight_than_are_allowed() -> None:
    async def meet(connection: Connection) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return await finish(connection)

    async with (
        playing(otherwise=meet) as stage,
        AsyncClient(stage.url, at_once=3) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for n in range(12):
            tasks.create_task(client.run(f"add-{n}"))

    assert len(stage.posts) == 12
    assert stage.most == 3
    assert len(stage.peers) == 3, "a connection carries one order after the other"


async def test_an_instance_goes_whole_over_a_unix_socket(tmp_path: Path) -> None:
    stage = Stage()
    await stage.start(tmp_path / "s")
    try:
        async with AsyncClient(stage.url) as client:
            rollout = await client.run(Instance(id="new", files={"a.bin": b"\xff\x00"}))
            unfinished = await client.result("k")
            health = await client.health()
    finally:
        await stage.stop()

    assert rollout.instance == "new"
    assert stage.connections[0].order.instance == Instance(id="new", files={"a.bin": b"\xff\x00"})
    assert unfinished is None
    assert health.state == "draining", "although its status says 503"


def test_importing_the_client_loads_no_conductor() -> None:
    script = "import sys, holdwater.client; print(*(m for m in sys.modules if m.startswith('holdwater.')))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    rooms = {name.split(".")[1] for name in loaded.split()}
    assert rooms == {"client", "core", "version", "web"}
