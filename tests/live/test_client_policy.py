"""A trainer that answers its agents' model calls itself: whole calls come out of deltas, answers go back."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from aiohttp import web
from tests.faulty_server import Connection, called, cut, playing

from holdwater.client import (
    AsyncClient,
    CallAnswer,
    Dropped,
    ModelChoice,
    ModelSource,
    Order,
    PolicyCall,
    Settled,
)
from holdwater.client.policy import CallHistory, PolicyRunner, UnknownParent
from holdwater.core.serving_protocol import KEPT_CALLS, Accepted


def texts(call: PolicyCall) -> list[str]:
    return [message["content"] for message in call.messages]


async def two_calls(connection: Connection) -> web.StreamResponse:
    await connection.tell(Accepted(order=1), called("1", "hello"))
    first = await connection.answer("1")
    await connection.tell(called("2", first.text or "", "and?", parent="1", keep=1))
    await connection.answer("2")
    return await connection.finish()


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_conversation_is_assembled_from_its_new_messages(kind: str) -> None:
    calls: list[PolicyCall] = []

    async def policy(call: PolicyCall) -> str:
        return plain(call)

    def plain(call: PolicyCall) -> str:
        calls.append(call)
        return f"reply {len(calls)}"

    async with playing(two_calls) as stage, AsyncClient(stage.url) as client:
        rollout = await client.run("add-1", policy=policy if kind == "async" else plain)

    assert rollout.outcome == "passed"
    assert [texts(call) for call in calls] == [["hello"], ["hello", "reply 1", "and?"]]
    assert calls[1].request == calls[1].chat == {"model": "m", "messages": calls[1].messages}
    assert stage.connections[0].order.model == ModelChoice(source=ModelSource.TRAINER)


async def answer_to_one(policy: Any, errors: Any = "raise", **wishes: Any) -> CallAnswer:
    found: list[CallAnswer] = []

    async def one_call(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "hello"))
        found.append(await connection.answer("1"))
        return await connection.finish()

    async with playing(one_call) as stage, AsyncClient(stage.url, policy_errors=errors) as client:
        await client.run("add-1", policy=policy, **wishes)
    return found[0]


async def test_whatever_a_policy_returns_is_an_answer_to_its_call() -> None:
    message = {"role": "assistant", "content": "hi"}
    choice = ModelChoice(source=ModelSource.TRAINER, version="7")

    assert await answer_to_one(lambda call: message, model=choice) == CallAnswer(
        "1", reply=message, version="7"
    )
    said = CallAnswer("?", text="hi", version="8")
    assert await answer_to_one(lambda call: said, model=choice) == CallAnswer("1", text="hi", version="8")


async def cancel_itself(call: PolicyCall) -> str:
    raise asyncio.CancelledError


FAILING = {
    "raises": lambda call: 1 / 0,
    "returns a number": lambda call: 3,
    "returns what cannot be sent": lambda call: {"content": object()},
    "cancels itself": cancel_itself,
}


@pytest.mark.parametrize("policy", FAILING.values(), ids=FAILING)
async def test_a_policy_that_fails_can_fail_its_call_alone(policy: Any) -> None:
    answer = await answer_to_one(policy, errors="fail")

    assert answer.error is not None and answer.error.startswith("the policy failed: ")


@pytest.mark.parametrize("policy", FAILING.values(), ids=FAILING)
async def test_an_error_of_a_policy_reaches_the_caller_of_its_order(policy: Any) -> None:
    left = asyncio.Event()

    async def wait(connection: Connection) -> web.StreamResponse:
        try:
            await connection.tell(Accepted(order=1), called("1", "hello"))
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    async with playing(wait) as stage, AsyncClient(stage.url) as client:
        with pytest.raises((ZeroDivisionError, TypeError, RuntimeError)):
            await client.run("add-1", policy=policy)
        await left.wait()

    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
    assert stage.deleted.qsize() == 1 and stage.answers == {}


async def test_a_cancelled_order_stays_cancelled_though_its_policy_fails() -> None:
    async def wait(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "hello"))
        await asyncio.Event().wait()
        raise AssertionError

    async def policy(call: PolicyCall) -> str:
        order.cancel()
        raise ValueError("too late")

    async with playing(wait) as stage, AsyncClient(stage.url) as client:
        order = asyncio.create_task(client.run("add-1", policy=policy))
        await asyncio.wait({order})

    assert order.cancelled()


class NotingPolicy:
    """Notes each rollout that has ended."""

    def __init__(self) -> None:
        self.calls: list[PolicyCall] = []
        self.ended: list[tuple[str, int]] = []

    async def __call__(self, call: PolicyCall) -> str:
        self.calls.append(call)
        return "hi"

    def end_member(self, order: str, member: int) -> None:
        self.ended.append((order, member))


async def test_a_policy_hears_which_call_goes_on_and_which_rollout_ended() -> None:
    policy = NotingPolicy()

    async def talk(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "hello"), called("2", "you", member=1))
        await connection.answer("1")
        await connection.answer("2")
        await connection.tell(Settled(member=1, outcome="passed"))
        await connection.tell(called("3", "and?", parent="1", keep=1))
        await connection.answer("3")
        return await connection.finish()

    async with playing(talk) as stage, AsyncClient(stage.url) as client:
        await client.run_group("add-1", 2, key="k", policy=policy)

    assert [(call.parent, call.keep) for call in policy.calls] == [(None, 0), (None, 0), ("1", 1)]
    assert policy.ended == [("k", 1), ("k", 0)]


async def test_gathered_results_are_in_the_order_of_the_orders() -> None:
    last = asyncio.Event()

    async def go(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1))
        if connection.order.key == "2":
            last.set()
        else:
            await last.wait()
        return await connection.finish()

    orders = [Order(key=str(n), instance=f"i{n}") for n in range(3)]
    async with playing(otherwise=go) as stage, AsyncClient(stage.url) as client:
        results = await client.gather(orders)

    assert [(result.key, result.rollouts[0].instance) for result in results] == [
        ("0", "i0"),
        ("1", "i1"),
        ("2", "i2"),
    ]


async def test_an_error_of_one_gathered_order_ends_the_others() -> None:
    async def ask_one(connection: Connection) -> web.StreamResponse:
        if connection.order.key == "1":
            await connection.stage.hanging.wait()
            await connection.tell(Accepted(order=1), called("1", "hello"))
        return await connection.hang()

    def policy(call: PolicyCall) -> str:
        raise MemoryError("out of memory")

    orders = [Order(key=str(n), instance="add-1") for n in range(2)]
    async with playing(otherwise=ask_one) as stage, AsyncClient(stage.url) as client:
        with pytest.raises(MemoryError):
            await client.gather(orders, policy=policy)
        assert {await stage.deleted.get(), await stage.deleted.get()} == {"0", "1"}


async def test_a_dropped_call_ends_its_policy() -> None:
    ended = asyncio.Event()

    async def drop(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "hello"))
        await begun.wait()
        await connection.tell(Dropped(member=0, call="1"))
        await ended.wait()
        return await connection.finish()

    begun = asyncio.Event()

    async def policy(call: PolicyCall) -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "never"

    async with playing(drop) as stage, AsyncClient(stage.url) as client:
        await client.run("add-1", policy=policy)

    assert stage.answers == {}


async def test_a_call_repeated_after_its_answer_is_not_asked_again() -> None:
    """As when a connection is lost: what is told on the next may cross the answer."""
    asked: list[str] = []

    async def again(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1))
        for call in ("1", "2"):
            await connection.tell(called(call, "hello"))
            await connection.answer(call)
        await connection.tell(called("1", "hello"), called("3", "hello"))
        await connection.answer("3")
        return await connection.finish()

    def policy(call: PolicyCall) -> str:
        asked.append(call.id)
        return "hi"

    async with playing(again) as stage, AsyncClient(stage.url) as client:
        await client.run("add-1", policy=policy)

    assert asked == ["1", "2", "3"]


async def test_a_lost_connection_neither_asks_twice_nor_loses_known_calls() -> None:
    asked: list[str] = []
    goes_on = asyncio.Event()

    async def lose(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "hello"))
        await connection.answer("1")
        await connection.tell(called("2", "and?", parent="1", keep=1))
        while "2" not in asked:
            await asyncio.sleep(0.001)
        return cut(connection)

    async def go_on(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1, new=False), called("2", "and?", parent="1", keep=1))
        goes_on.set()
        await connection.answer("2")
        return await connection.finish()

    async def policy(call: PolicyCall) -> str:
        asked.append(call.id)
        if call.id == "2":
            await goes_on.wait()
        return "yes"

    async with playing(lose, go_on) as stage, AsyncClient(stage.url) as client:
        await client.run("add-1", policy=policy)

    assert asked == ["1", "2"]
    assert stage.connections[1].have == {"1", "2"}


async def test_a_call_after_one_that_is_not_known_is_asked_for_anew() -> None:
    heard: list[list[str]] = []

    async def refer(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("8", "and?", parent="7", keep=1))
        await asyncio.Event().wait()
        raise AssertionError

    async def whole(connection: Connection) -> web.StreamResponse:
        assert "7" not in connection.have
        await connection.tell(Accepted(order=1), called("8", "hello", "and?"))
        await connection.answer("8")
        return await connection.finish()

    def policy(call: PolicyCall) -> str:
        heard.append(texts(call))
        return "yes"

    async with playing(refer, whole) as stage, AsyncClient(stage.url) as client:
        await client.run("add-1", policy=policy)

    assert heard == [["hello", "and?"]]


async def test_an_answer_to_a_call_that_is_gone_is_no_failure() -> None:
    async def forget(connection: Connection) -> web.StreamResponse:
        await connection.tell(Accepted(order=1), called("1", "a"), called("2", "b"))
        await connection.answer("2")
        return await connection.finish()

    async with playing(forget) as stage, AsyncClient(stage.url) as client:
        stage.gone.add("1")
        assert (await client.run("add-1", policy=lambda call: "x")).outcome == "passed"


async def test_no_more_calls_are_given_to_a_policy_than_are_allowed() -> None:
    lock = threading.Lock()
    now = most = 0

    async def many(connection: Connection) -> web.StreamResponse:
        ids = [str(n) for n in range(100)]
        await connection.tell(Accepted(order=1), *(called(n, "hello", member=int(n)) for n in ids))
        for n in ids:
            await connection.answer(n)
        return await connection.finish()

    async def policy(call: PolicyCall) -> str:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        await asyncio.sleep(0.001)
        with lock:
            now -= 1
        return str(call.member)

    async with playing(many) as stage, AsyncClient(stage.url, calls_at_once=8) as client:
        await client.run_group("add-1", 100, policy=policy)

    assert most == 8


async def test_an_order_that_is_over_leaves_nothing_behind() -> None:
    async def policy(call: PolicyCall) -> str:  # a thread would be a moment late to let go
        return "x"

    gc.collect()
    gc.disable()
    try:
        async with playing(two_calls) as stage, AsyncClient(stage.url) as client:
            await client.run("add-1", policy=policy)
            await asyncio.sleep(0)  # the last callbacks
            left = [
                kept for kept in gc.get_objects() if isinstance(kept, PolicyRunner | CallHistory | PolicyCall)
            ]
    finally:
        gc.enable()

    assert left == []


def test_of_a_long_conversation_the_newest_calls_are_known_and_no_others() -> None:
    known = CallHistory("k")
    known.rebuild_call(called("0", "hello"))
    for n in range(1, 40):
        call = known.rebuild_call(called(str(n), "more", parent=str(n - 1), keep=n))
        assert len(call.messages) == n + 1

    assert known.render_known().split(",") == [str(n) for n in range(39, 39 - KEPT_CALLS, -1)]
    with pytest.raises(UnknownParent):
        known.rebuild_call(called("x", parent="20", keep=1))
    known.forget(0)
    assert known.render_known() == ""
