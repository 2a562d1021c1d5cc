"""How fast calls go up: the run's own rate, and what an upstream can bear; and when nobody gets through."""

import asyncio

from tests.gateway_harness import Log, ask, scene

from holdwater.core.records import FailureOrigin
from holdwater.gateway.call_terms import CallTerms, RateLimiter
from holdwater.gateway.upstreams.retry import CircuitBreaker, UpstreamGate
from holdwater.testing.scripted_model import ScriptedReply, serve_script


def fine(request):
    return ScriptedReply(text="fine")


async def call(s, key=None):
    async with s.post(ask("hi"), key=key) as response:
        await response.read()
        return response.status


async def test_calls_keep_the_rate_and_their_waiting_is_no_work():
    times = []

    def look(request):
        times.append(asyncio.get_running_loop().time())
        return fine(request)

    async with (
        serve_script(look) as upstream,
        scene(upstream, terms=CallTerms(rate=RateLimiter(600, None))) as s,
    ):  # 10 a second
        began = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(call(s))
        took = times[-1] - began
        assert took >= (30 - 20) / 10 - 0.2  # all but the burst, one after another
        assert 0.0 < s.session.waited <= took + 0.2
        assert (len(times), s.session.usage.requests) == (30, 30)


async def test_tokens_are_paid_for_when_they_are_known():
    async with (
        serve_script(fine) as upstream,
        scene(upstream, terms=CallTerms(rate=RateLimiter(None, 3000))) as s,
    ):  # 50 a second
        assert await call(s) == 200
        used = s.session.usage.tokens
        for _ in range(8):
            await call(s)
        # What is over the burst of 100 has been waited for, but for the last call, which is paid afterwards.
        assert s.session.waited >= (8 * used - 100) / 50 - 0.2 > 0


async def test_a_share_of_a_rate_is_that_much_slower():
    rate = RateLimiter(60, None, share=0.5)
    async with rate.turn(_nothing):
        pass
    assert 1.5 < rate._delay() <= 2.0


def _nothing():
    raise AssertionError("nobody has to wait")


async def test_a_session_that_closes_during_a_rate_wait_is_answered_at_once():
    async with (
        serve_script(fine) as upstream,
        scene(upstream, terms=CallTerms(rate=RateLimiter(0.1, None))) as s,
    ):
        async with s.gateway.open_session(2, Log()) as session:
            assert await call(s, session.key) == 200
            held = asyncio.ensure_future(call(s, session.key))
            while not session._waits:
                await asyncio.sleep(0)
        assert await held == 400


async def test_an_overloaded_upstream_gets_fewer_calls_until_it_can_serve_them():
    inside, most, refusals = 0, 0, 0

    async def busy(request):
        nonlocal inside, most, refusals
        if inside >= 4:
            refusals += 1
            return ScriptedReply(status=429, headers={"Retry-After": "0"})
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return fine(request)

    async with serve_script(busy) as upstream, scene(upstream, retries=20) as s:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call(s)) for _ in range(100)]
        assert [task.result() for task in tasks] == [200] * 100
        assert most == 4
        assert refusals < 200  # without the gate each of 96 calls is refused again and again: thousands
        assert s.session.waited > 0


async def test_a_burst_of_refusals_halves_once_and_successes_open_the_gate_again():
    gate = UpstreamGate()
    entered = [await gate.enter(_nothing) for _ in range(16)]
    for when in entered:
        gate.record_refusal(when)
    assert gate.limit == 8
    for _ in range(8):
        gate.leave()
        gate.record_success()
    assert (gate.limit, gate.inside) == (9, 8)


async def test_an_abandoned_wait_at_the_gate_takes_no_place():
    from contextlib import nullcontext

    gate = UpstreamGate()
    gate.record_refusal(await gate.enter(nullcontext))
    first, second = (asyncio.ensure_future(gate.enter(nullcontext)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    gate.leave()
    await second
    assert (gate.limit, gate.inside) == (1, 1)


async def test_when_no_attempt_gets_through_the_run_is_to_stop():
    breaker = CircuitBreaker(attempts=3, seconds=0.0)
    async with (
        serve_script(lambda request: ScriptedReply(status=500)) as upstream,
        scene(upstream, retries=0, breaker=breaker) as s,
    ):
        wheres = []
        for attempt in range(2, 5):
            async with s.gateway.open_session(attempt, Log()) as session:
                await call(s, session.key)
                wheres.append((session.failure.where, session.failure.kind))
        assert wheres == [
            (FailureOrigin.MODEL, "5xx"),
            (FailureOrigin.MODEL, "5xx"),
            (FailureOrigin.RUN, "breaker"),
        ]


async def test_an_upstream_that_is_gone_for_all_stops_the_run():
    breaker = CircuitBreaker(attempts=1, seconds=0.0)
    async with scene("http://127.0.0.1:9/v1", retries=0, breaker=breaker) as s:
        assert await call(s) == 502
        assert (s.session.failure.where, s.session.failure.kind) == (FailureOrigin.RUN, "breaker")
        assert "cannot be reached" in s.session.failure.message
        assert s.session.usage.cost == 0.0


async def test_an_account_without_money_is_seen_at_the_first_answer():
    calls = []
    body = b'{"error": {"message": "no money", "type": "insufficient_quota", "code": "insufficient_quota"}}'

    def poor(request):
        calls.append(request)
        return ScriptedReply(status=429, body=body)

    async with serve_script(poor) as upstream, scene(upstream) as s:
        assert await call(s) == 429
        assert (s.session.failure.where, s.session.failure.kind, len(calls)) == (
            FailureOrigin.RUN,
            "quota",
            1,
        )
