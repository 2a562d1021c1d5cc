"""Orders as a client sees them, on a server in this process: keys, instances, models, results that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server_harness import SUITE, eventually, model
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.api.runs import start
from holdwater.api.serving import prepare_server
from holdwater.client import AsyncClient, Client, OrderRefused, PolicyCall
from holdwater.core.errors import BadInput
from holdwater.core.groups import GroupTerms
from holdwater.core.records import Instance, LimitOverrides
from holdwater.core.serving_protocol import (
    AnyOrderEvent,
    ModelChoice,
    ModelSource,
    Order,
    TrajectoryForm,
    Turned,
)

TRAINER = ModelChoice(source=ModelSource.TRAINER)


@asynccontextmanager
async def serving(place: Path, *, agent: str | None = None, **options: Any) -> AsyncIterator[AsyncClient]:
    """A server whose attempts live in this process, and a client of it."""
    (place / "command_runner.py").write_text(SUITE)
    said: dict[str, Any] = {"listen": f"unix:{place}/socket", **options.pop("serving", {})}
    prepared = prepare_server(
        f"{place}/command_runner.py:suite",
        agent or f"{place}/command_runner.py:solve",
        place / "run",
        {"workers": 0, "concurrency": 4, **options},
        said,
    )
    server = asyncio.create_task(start(prepared))
    try:
        async with AsyncClient(f"unix:{place}/socket", patience=20.0) as client:
            await eventually(lambda: (place / "socket").exists() or server.done(), 20.0)
            await client.stats()  # finds the token, which is there before the first reply
            yield client
            await client.drain()
        await asyncio.wait_for(server, stretch(20.0))
    finally:
        server.cancel()
        await asyncio.wait([server])


async def test_the_same_key_is_the_same_order_and_other_content_conflicts(tmp_path: Path) -> None:
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        first, second = await asyncio.gather(
            client.order(Order(key="k", instance="i1")), client.order(Order(key="k", instance="i1"))
        )
        third = await client.order(Order(key="k", instance="i1"))
        with pytest.raises(OrderRefused, match="used by a different request") as refused:
            await client.order(Order(key="k", instance="i2"))

    assert first.rollouts == second.rollouts == third.rollouts
    assert third.new is False
    assert refused.value.code == "conflict"
    assert hw.audit(tmp_path / "run").planned == 1


@pytest.mark.parametrize(
    ("order", "code", "told"),
    [
        (Order(key="k", instance="nobody", model=TRAINER), "unknown", "no such instance: `nobody`"),
        (Order(key="k", instance="i1", size=9), "invalid", "9 rollouts exceed the limit of open rollouts: 8"),
        (Order(key="k", instance="i1", size=5, group=GroupTerms()), "invalid", "does not fit 4 slots"),
        (
            Order(key="k", instance="i1", model=ModelChoice(source=ModelSource.FUNCTION)),
            "invalid",
            "no policy",
        ),
        (Order(key="k", instance="i1"), "invalid", "the server has no model"),
    ],
)
async def test_what_cannot_be_done_is_refused_and_nothing_is_written(
    tmp_path: Path, order: Order, code: str, told: str
) -> None:
    async with serving(tmp_path, serving={"queue": 8}) as client:
        with pytest.raises(OrderRefused, match=told) as refused:
            await client.order(order)
        open_orders = (await client.stats()).orders["open"]

    assert refused.value.code == code
    assert (open_orders, hw.audit(tmp_path / "run").planned) == (0, 0)


async def test_an_instance_brought_by_an_order_is_stored_once_and_tried_unchanged(tmp_path: Path) -> None:
    brought = Instance(id="mine", instruction="mine", data={"turns": 1, "score": 0.25})
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        rollouts = [await client.run(brought) for _ in range(2)]
        other = await client.run(Instance(id="mine", instruction="another", data={"turns": 1}))

    assert [(rollout.reward, rollout.sample) for rollout in rollouts] == [(0.25, 0), (0.25, 1)]
    assert rollouts[0].instance == rollouts[1].instance != other.instance


async def test_a_detached_order_goes_on_without_its_client_and_its_result_waits(tmp_path: Path) -> None:
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        upstream.gate.clear()
        following = asyncio.create_task(client.order(Order(key="d", instance="i1", detached=True)))
        await eventually(lambda: upstream.waiting == 1, 10.0)
        following.cancel()
        await asyncio.wait([following])
        upstream.gate.set()

        async def over() -> bool:
            return await client.result("d") is not None

        await eventually(over, 10.0)
        result = await client.result("d")

    assert result is not None and result.rollouts[0].outcome == "passed"


async def abandon(client: AsyncClient, order: Order) -> None:
    """Order it as a client does that dies: its connection is closed, and nothing is said."""
    async with client._server.open_stream(msgspec.msgpack.encode(order), {}) as frames:
        assert await frames.next() is not None


async def nothing_is_open(client: AsyncClient) -> bool:
    return (await client.stats()).orders["open"] == 0


@pytest.mark.parametrize("group", [None, GroupTerms()])
async def test_an_abandoned_order_runs_anew_when_its_key_comes_again(
    tmp_path: Path, group: GroupTerms | None
) -> None:
    order = Order(key="k", instance="i1", size=2, group=group)
    options = {"model": "m", "base_url": "", "serving": {"grace": 0.2}}
    async with model() as upstream, serving(tmp_path, **{**options, "base_url": upstream.url}) as client:
        upstream.gate.clear()
        await abandon(client, order)

        async def over() -> bool:
            return await client.result("k") is not None

        await eventually(over, 20.0)
        cancelled = await client.result("k")
        upstream.gate.set()
        again = await client.order(order)
        third = await client.order(order)
        await eventually(lambda: nothing_is_open(client), 20.0)

    assert cancelled is not None and {one.outcome for one in cancelled.rollouts} == {"cancelled"}
    assert [one.outcome for one in again.rollouts] == ["passed", "passed"]
    assert (again.new, third.new, again.together) == (True, False, group is not None)
    assert third.rollouts == again.rollouts
    found = hw.audit(tmp_path / "run")
    assert (found.ok, found.planned, found.settled) == (True, 2, 2), found


async def test_an_order_that_comes_back_while_it_is_cancelled_runs_anew(tmp_path: Path) -> None:
    order = Order(key="k", instance="i1")
    options = {"model": "m", "serving": {"grace": 0.0}}
    async with model() as upstream, serving(tmp_path, base_url=upstream.url, **options) as client:
        upstream.gate.clear()
        for _ in range(3):
            await abandon(client, order)
        upstream.gate.set()
        result = await client.order(order)
        await eventually(lambda: nothing_is_open(client), 20.0)

    assert [one.outcome for one in result.rollouts] == ["passed"]


async def test_a_cancelled_order_stays_cancelled_when_its_key_comes_again(tmp_path: Path) -> None:
    order = Order(key="k", instance="i1")
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        upstream.gate.clear()
        ordering = asyncio.create_task(client.order(order))
        await eventually(lambda: upstream.waiting == 1, 20.0)
        await client.cancel("k")
        await ordering
        upstream.gate.set()
        again = await client.order(order)

    assert [one.outcome for one in again.rollouts] == ["cancelled"]


async def test_an_order_whose_caller_was_cancelled_runs_anew(tmp_path: Path) -> None:
    order = Order(key="k", instance="i1")
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        upstream.gate.clear()
        ordering = asyncio.create_task(client.order(order))
        await eventually(lambda: upstream.waiting == 1, 20.0)
        ordering.cancel()
        await asyncio.wait({ordering})
        upstream.gate.set()
        again = await client.order(order)

    assert [one.outcome for one in again.rollouts] == ["passed"]


async def test_an_order_has_a_model_sampling_and_limits_of_its_own(tmp_path: Path) -> None:
    async with model() as upstream, serving(tmp_path, model="m", base_url="http://127.0.0.1:9/v1") as client:
        choice = ModelChoice(source=ModelSource.ENDPOINT, url=upstream.url, name="its-own", version="step-7")
        rollout = await client.run(
            "i1", model=choice, limits=LimitOverrides(requests=2), sampling={"temperature": 0.5}
        )

    assert rollout.failure is not None and rollout.failure.where == "limit"
    assert rollout.trajectory is not None
    assert {node.version for node in rollout.trajectory if node.sampled} == {"step-7"}
    assert upstream.bodies[0]["model"] == "its-own" and upstream.bodies[0]["temperature"] == 0.5


async def test_a_policy_answers_in_the_place_of_the_servers_model(tmp_path: Path) -> None:
    def policy(call: PolicyCall) -> str:
        return f"reply to {len(call.messages)} messages"

    def follow_map() -> list[str]:
        with Client(f"unix:{tmp_path}/socket") as plain:
            orders = [Order(key=f"map {n}", instance="i1") for n in range(2)]
            return [result.rollouts[0].answer for result in plain.map(orders, policy=policy)]

    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        result = await client.order(Order(key="one", instance="i1"), policy=policy)
        mapped = await asyncio.to_thread(follow_map)
        endpoint = ModelChoice(source=ModelSource.ENDPOINT, url=upstream.url)
        with pytest.raises(BadInput, match="a policy and another model cannot both answer") as refused:
            await client.order(Order(key="two", instance="i1", model=endpoint), policy=policy)

    assert [result.rollouts[0].answer, *mapped] == ["reply to 5 messages"] * 3
    assert sum(upstream.asked.values()) == 0
    assert "endpoint" in refused.value.message


async def test_a_bad_endpoint_of_one_order_does_not_stop_another(tmp_path: Path) -> None:
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url, retries=0) as client:
        upstream.refuses = 401
        refused = await client.run("i1")
        upstream.refuses = 0
        other = await client.run("i2")

    assert refused.failure is not None and refused.failure.where == "model"
    assert other.outcome == "passed"


async def test_what_the_server_was_steered_to_is_remembered_when_it_goes_on(tmp_path: Path) -> None:
    async with model() as upstream:
        async with serving(tmp_path) as client:
            await client.steer(upstream.url, "steered", version="1")
            first = await client.run("i1")
        async with serving(tmp_path) as client:
            second = await client.run("i1")

    for rollout in (first, second):
        assert rollout.trajectory is not None and rollout.outcome == "passed"
        assert {node.version for node in rollout.trajectory if node.sampled} == {"1"}


async def test_weights_that_change_in_mid_rollout_are_recorded_turn_by_turn(tmp_path: Path) -> None:
    async with model() as old, model() as new, serving(tmp_path) as client:
        await client.steer(old.url, version="old")
        old.gate.clear()
        run = asyncio.create_task(client.run("i1"))
        await eventually(lambda: old.waiting == 1, 10.0)
        await client.steer(new.url, version="new")
        old.gate.set()
        rollout = await run

    assert rollout.trajectory is not None
    assert [node.version for node in rollout.trajectory if node.sampled] == ["old", "new", "new"]


async def test_files_go_when_the_result_is_delivered_and_not_before(tmp_path: Path) -> None:
    async with (
        model() as upstream,
        serving(tmp_path, model="m", base_url=upstream.url, keep="none") as client,
    ):
        result = await client.order(Order(key="k", instance="i1"))
        exchanges = tmp_path / "run" / "exchanges"
        await eventually(lambda: not list(exchanges.rglob("*.seg")), 10.0)
        again = await client.order(Order(key="k", instance="i1"))

    assert result.rollouts[0].trajectory
    assert again.rollouts[0].reward == result.rollouts[0].reward and not again.rollouts[0].trajectory
    assert hw.audit(tmp_path / "run").ok


async def test_turn_events_carry_the_messages_of_their_turns(tmp_path: Path) -> None:
    turned: list[Turned] = []
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:

        def hear(event: AnyOrderEvent) -> None:
            if isinstance(event, Turned):
                turned.append(event)

        rollout = await client.run(Instance(id="slow", data={"turns": 3, "pause": 0.2}), on_event=hear)

    said = [node for event in turned for node in event.nodes]
    assert rollout.trajectory is not None
    assert said == list(rollout.trajectory)[: len(said)]
    assert len(turned) > 0 and turned[0].nodes[0].role == "user"


async def test_an_agent_that_needs_no_model_is_served_without_one(tmp_path: Path) -> None:
    async with serving(tmp_path, agent="nop") as client:
        rollout = await client.run("i1", trajectory=TrajectoryForm.NONE)

    assert rollout.outcome == "passed"


async def test_independent_rollouts_can_be_one_order(tmp_path: Path) -> None:
    async with model() as upstream, serving(tmp_path, model="m", base_url=upstream.url) as client:
        result = await client.order(Order(key="k", instance="i1", size=6))

    assert [rollout.outcome for rollout in result.rollouts] == ["passed"] * 6
    assert result.together is False
