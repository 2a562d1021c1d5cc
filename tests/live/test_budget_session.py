"""Budgets of an attempt at the gateway: the call after the last is refused, and clients do not retry it."""

import asyncio

import pytest
from tests.gateway_harness import Log, ask, scene

from holdwater.core.prices import ModelPrice
from holdwater.core.records import FailureOrigin, Limits
from holdwater.gateway.call_terms import CallTerms
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, apply_plan, serve_script

PRICE = ModelPrice(input=1.0, output=1000.0)  # a word of four letters: a tenth of a cent


def fine(request):
    return ScriptedReply(text="four" * 10)


async def status(s, key, **options):
    async with s.post(ask("hi", **options), key=key) as response:
        return response.status, await response.json(content_type=None), response.headers


@pytest.mark.parametrize(
    ("limits", "calls", "kind"),
    [
        (Limits(requests=3), 3, "requests"),
        (Limits(output_tokens=11), 2, "tokens"),
        (Limits(input_tokens=1), 1, "tokens"),
        (Limits(cost=0.021), 3, "cost"),
    ],
)
async def test_the_call_beyond_the_budget_is_refused_and_ends_the_attempt(limits, calls, kind):
    log = Log()
    async with (
        serve_script(fine) as upstream,
        scene(upstream, terms=CallTerms(PRICE)) as s,
        s.gateway.open_session(2, log, limits) as session,
    ):
        for _ in range(calls):
            assert (await status(s, session.key))[0] == 200
        assert session.failure is None
        for _ in range(2):
            code, body, headers = await status(s, session.key)
            assert (code, headers["x-should-retry"]) == (400, "false")
            assert body["error"]["message"].startswith("the attempt's budget is used up: ")
        assert (session.failure.where, session.failure.kind) == (FailureOrigin.LIMIT, kind)
        assert len(log.exchanges) == calls == session.usage.requests


async def test_calls_at_once_do_not_exceed_the_number_of_requests():
    arrived, go = asyncio.Event(), asyncio.Event()
    seen = []

    async def held(request):
        seen.append(request)
        if len(seen) == 3:
            arrived.set()
        await go.wait()
        return fine(request)

    async with (
        serve_script(held) as upstream,
        scene(upstream) as s,
        s.gateway.open_session(2, Log(), Limits(requests=3)) as session,
    ):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(status(s, session.key)) for _ in range(8)]
            await arrived.wait()
            refused = 0
            while refused < 5:
                await asyncio.sleep(0)
                refused = sum(task.done() for task in tasks)
            go.set()
        assert sorted(task.result()[0] for task in tasks) == [200] * 3 + [400] * 5
        assert len(seen) == 3


async def test_a_request_that_is_no_request_uses_nothing_up():
    async with (
        serve_script(fine) as upstream,
        scene(upstream) as s,
        s.gateway.open_session(2, Log(), Limits(requests=1)) as session,
    ):
        async with s.post(b"{", key=session.key) as response:
            assert response.status == 400
        assert (await status(s, session.key))[0] == 200


async def test_each_exchange_has_its_cost_and_an_unknown_cost_stays_unknown():
    plan = [None, ScriptedReply(status=400), ReplyFault.GARBAGE, None]
    async with serve_script(apply_plan(plan, fine)) as upstream, scene(upstream, terms=CallTerms(PRICE)) as s:
        for stream in (False, False, False, True):
            async with s.post(ask("hi", stream=stream)) as response:
                await response.read()
        costs = [exchange.usage.cost for exchange in s.log.exchanges]
        first = s.log.exchanges[0].usage
        assert costs[0] == pytest.approx(first.input_tokens * 1e-6 + 10 * 1e-3)
        assert costs[1:3] == [0.0, None]  # refused by the provider: free; an answer without usage: unknown
        assert costs[3] >= 0.01
        assert s.session.usage.cost is None
        assert s.session.usage.nanodollars == sum(e.usage.nanodollars for e in s.log.exchanges)


async def test_parameters_are_imposed_on_what_upstream_and_record_see():
    seen = []

    def look(request):
        seen.append(request)
        return fine(request)

    async with (
        serve_script(look) as upstream,
        scene(upstream, terms=CallTerms(sampling={"temperature": 0.5})) as s,
    ):
        await status(s, s.session.key, temperature=1.0, top_p=0.9)
        assert (seen[0]["temperature"], seen[0]["top_p"]) == (0.5, 0.9)
        assert s.log.requests() == seen
