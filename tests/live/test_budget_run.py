"""Budgets through whole runs: an attempt is cut and graded on what it left, a run stops and can go on."""

import io
import json

import pytest
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.core.records import FailureOrigin
from holdwater.export.formats import export_run
from holdwater.testing.scripted_model import ScriptedReply, serve_script

PRICES = '["test-*"]\ninput = 10.0\noutput = 100.0\n'


def suite(count, **limits):
    ask = hw.LimitOverrides(**limits)
    return hw.Suite(
        name="s",
        instances=lambda: (hw.Instance(id=f"i{n}", limits=ask) for n in range(count)),
        grade=lambda instance, sandbox, answer: True,
    )


def talks(turns):
    async def act(instance, sandbox, model):
        for _ in range(turns):
            await model.chat([{"role": "user", "content": "hi"}])

    return act


def exported(path, what):
    out = io.BytesIO()
    export_run(path, what, "jsonl", out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


@pytest.fixture
async def base_url():
    async with serve_script(lambda request: ScriptedReply(text="a reply", delay=0.05)) as url:
        yield url


@pytest.fixture
def prices(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


async def test_an_attempt_that_used_up_its_budget_is_graded_on_its_work(tmp_path, base_url):
    async def gives_in(instance, sandbox, model):
        try:
            await talks(5)(instance, sandbox, model)
        except hw.ModelFailed:
            return "what I have"

    for agent, out in ((talks(5), tmp_path / "raises"), (gives_in, tmp_path / "gives in")):
        summary = await hw.arun(
            suite(2, requests=2),
            agent,
            out=out,
            model="m",
            base_url=base_url,
            max_requests=9,
            max_output_tokens=99,
        )
        assert (summary.outcomes, summary.exit_status, summary.usage.requests) == ({"passed": 2}, 0, 4)
        for row in exported(out, "attempts"):
            assert (row["where"], row["failure_kind"], row["phase"]) == (
                FailureOrigin.LIMIT,
                "requests",
                "acting",
            )
            assert row["failure"] == "the attempt's budget is used up: 2 of 2 requests"


async def test_costs_add_up_from_exchanges_to_the_run(tmp_path, base_url, prices):
    out = tmp_path / "run"
    summary = await hw.arun(
        suite(3), talks(2), out=out, model="test-1", base_url=base_url, prices=prices, samples=2
    )
    assert summary.cost > 0
    for what in ("exchanges", "attempts", "outcomes"):
        rows = exported(out, what)
        costs = [row["usage"]["cost"] if what == "exchanges" else row["cost"] for row in rows]
        assert sum(costs) == pytest.approx(summary.cost, rel=1e-12)
    assert sum(row["total_cost"] for row in exported(out, "outcomes")) == pytest.approx(summary.cost)
    assert summary.usage.priced == summary.usage.requests == 12


async def test_a_run_that_used_up_its_budget_continues_with_a_larger_one(tmp_path, base_url, prices):
    out, given = tmp_path / "run", suite(16)
    agent = talks(4)
    summary = await hw.arun(
        given, agent, out=out, model="test-1", base_url=base_url, prices=prices, concurrency=1, run_cost=0.002
    )
    assert (summary.state, summary.exit_status) == ("stopped", 4)
    assert summary.reason.startswith("the run's budget is used up: $0.0")
    assert "larger budget" in summary.reason
    assert 0 < summary.settled < 16

    again = await hw.aresume(out, suite=given, agent=agent)
    assert (again.exit_status, again.usage) == (4, summary.usage)

    done = await hw.aresume(out, suite=given, agent=agent, run_cost=100.0)
    assert (done.state, done.exit_status, done.outcomes) == ("finished", 0, {"passed": 16})
    assert hw.audit(out).ok


async def test_the_time_of_a_run_is_a_budget_too(tmp_path):
    async def sleeps(instance, sandbox, model):
        import asyncio

        await asyncio.sleep(60)

    summary = await hw.arun(suite(1), sleeps, out=tmp_path / "run", run_time=0.5)
    assert (summary.state, summary.exit_status, summary.seconds < stretch(30)) == ("stopped", 4, True)
    assert summary.reason.startswith("the run's budget is used up: 1 of 0.5 s")
    assert exported(tmp_path / "run", "attempts")[0]["where"] == FailureOrigin.INTERRUPTED


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_cost": 1.0}, "needs the model's price"),
        ({"run_cost": 1.0}, "needs the model's price"),
        ({"max_requests": 0}, "`--max-requests` must be more than 0: 0"),
        ({"rpm": -1}, "`--rpm` must be more than 0"),
        ({"sampling": ["x"]}, "`--sampling` must look like"),
    ],
)
async def test_budgets_that_cannot_be_kept_are_refused(tmp_path, options, words):
    with pytest.raises(hw.BadInput, match=words):
        await hw.arun(
            suite(1), talks(1), out=tmp_path / "run", model="nobodys", base_url="http://x/v1", **options
        )
    assert not (tmp_path / "run").exists()


async def test_an_instance_that_asks_for_a_limit_on_cost_needs_a_price(tmp_path, base_url):
    summary = await hw.arun(suite(1, cost=1.0), talks(1), out=tmp_path / "run", model="m", base_url=base_url)
    assert (summary.exit_status, "needs the model's price" in summary.reason) == (4, True)
