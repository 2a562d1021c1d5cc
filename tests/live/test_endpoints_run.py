"""A run with several servers: how they are given, what is kept of them, and what a run shows."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.in_process_run import QUICK, attempts, events, failed, kinds
from tests.secret_search import found

import holdwater as hw
from holdwater.api.runs import prepare
from holdwater.cli import main
from holdwater.cli.run_flags import RunFlags, merge_flags
from holdwater.core.config import RunConfig
from holdwater.core.endpoints import EndpointState, EndpointUse, ServerEndpoint
from holdwater.core.errors import BadInput
from holdwater.core.serving_protocol import ServerHealth, ServerStats
from holdwater.run.fleet.endpoint_tally import EndpointTally
from holdwater.run.orders.metrics import render_metrics
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

COUNT, TURNS = 6, 3
NODE_KEY, RUN_KEY = "key-of-the-second-node", "key-of-the-run-itself"
TABLES = """
model = "big-30b"

[[base-url]]
url = "http://127.0.0.1:9001/v1"

[[base-url]]
url = "http://127.0.0.1:9002/v1"
weight = 2
key = "NODE_KEY"
models = ["big-*", "tiny-4b"]

[model-map]
small = "tiny-4b"
"""


async def solve(instance: hw.Instance, sandbox: Any, model: Any) -> str:
    messages = [{"role": "user", "content": instance.id}]
    for _ in range(TURNS):
        reply = await model.chat(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
    await model.chat([{"role": "user", "content": f"a title for {instance.id}"}], model=model.side_name)
    return "done"


SUITE = hw.Suite(
    name="talking",
    instances=lambda: [hw.Instance(id=f"i{n}") for n in range(COUNT)],
    grade=lambda instance, sandbox, answer: answer == "done",
)


class NodeServer:
    """A server that writes down its requests; it can be started again on its port."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # key and model
        self.url = ""

    def answer(self, headers: Any, body: bytes) -> ScriptedReply:
        key = headers.get("Authorization", "").removeprefix("Bearer ")
        self.calls.append((key, msgspec.json.decode(body)["model"]))
        return ScriptedReply(text="said")

    def serve(self) -> Any:
        port = int(self.url.removesuffix("/v1").rpartition(":")[2]) if self.url else 0
        return serve_raw(self.answer, port)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[NodeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", RUN_KEY)
    monkeypatch.setenv("NODE_KEY", NODE_KEY)
    return [NodeServer(), NodeServer()]


async def serve(nodes: list[NodeServer], work: Any) -> Any:
    """Do the work in a thread while the servers run."""
    async with AsyncExitStack() as stack:
        for node in nodes:
            node.url = await stack.enter_async_context(node.serve())
        return await asyncio.to_thread(work)


def run(nodes: list[NodeServer], out: Path, **options: Any) -> Any:
    servers = [nodes[0].url, {"url": nodes[1].url, "weight": 2, "key": "NODE_KEY"}]
    given: dict[str, Any] = {**QUICK, "retries": 1, "model": "big", "base_url": servers, **options}
    return hw.run(SUITE, solve, out=out, **given)


async def test_calls_are_spread_and_each_server_has_its_key(
    nodes: list[NodeServer], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    summary = await serve(nodes, lambda: run(nodes, out, model_map={"small": "tiny"}))

    assert kinds(out) == {f"i{n}": "passed" for n in range(COUNT)}
    assert [{key for key, _ in node.calls} for node in nodes] == [{RUN_KEY}, {NODE_KEY}]
    called = [model for node in nodes for _, model in node.calls]
    assert (called.count("big"), called.count("tiny")) == (COUNT * TURNS, COUNT)
    assert [(use.url, use.requests, use.failures) for use in summary.endpoints] == [
        (node.url, len(node.calls), 0) for node in nodes
    ]
    assert {use.state for use in summary.endpoints} == {EndpointState.OK}
    kept = json.loads((out / "run.json").read_text())
    assert kept["base_url"] == [
        {"url": nodes[0].url},
        {"url": nodes[1].url, "weight": 2.0, "key": "NODE_KEY"},
    ]
    assert kept["model_map"] == {"small": "tiny"}
    assert found(NODE_KEY, tmp_path) == found(RUN_KEY, tmp_path) == []
    assert main(["show", str(out)]) == 0
    assert f"{nodes[1].url}: {len(nodes[1].calls)} calls, 0 failed, ok" in capfd.readouterr().out
    assert main(["show", str(out), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["endpoints"][0]["requests"] == len(nodes[0].calls)


async def test_without_servers_attempts_are_retried_and_nothing_is_a_zero(
    nodes: list[NodeServer], tmp_path: Path
) -> None:
    await serve(nodes, lambda: None)  # they have ports, and are gone
    out = tmp_path / "run"
    summary = await asyncio.to_thread(lambda: run(nodes, out))

    assert set(kinds(out).values()) == {"model"}
    assert summary.score is None and summary.exit_status != 0
    assert {row.verdict.failure.kind for row in failed(out) if row.verdict and row.verdict.failure} == {
        "unreachable"
    }
    assert len(attempts(out)) == 2 * COUNT  # each was retried once
    assert {use.state for use in summary.endpoints} == {EndpointState.DOWN}
    assert len(events(out, "endpoint.failed")) == 2

    def resume() -> Any:
        return hw.resume(out, suite=SUITE, agent=solve, retry="infrastructure")

    before = [use.requests for use in summary.endpoints]
    summary = await serve(nodes, resume)

    assert set(kinds(out).values()) == {"passed"}
    assert len(nodes[0].calls) + len(nodes[1].calls) == COUNT * (TURNS + 1)
    totals = [old + len(node.calls) for old, node in zip(before, nodes, strict=True)]
    assert [use.requests for use in summary.endpoints] == totals


async def test_a_resume_needs_the_keys_again_and_can_replace_the_servers(
    nodes: list[NodeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve(nodes, lambda: None)
    out = tmp_path / "run"
    await asyncio.to_thread(lambda: run(nodes, out, retries=0))
    monkeypatch.delenv("NODE_KEY")

    with pytest.raises(BadInput, match="the variable is not set: `NODE_KEY`"):
        await asyncio.to_thread(lambda: hw.resume(out, suite=SUITE, agent=solve, retry="infrastructure"))

    def resume() -> Any:
        urls = [node.url for node in nodes]
        return hw.resume(out, suite=SUITE, agent=solve, base_url=urls, retry="infrastructure")

    await serve(nodes, resume)
    assert set(kinds(out).values()) == {"passed"}
    assert {key for node in nodes for key, _ in node.calls} == {RUN_KEY}
    [changed] = events(out, "resume.changed")
    assert f"`--base-url`: {nodes[0].url}, {nodes[1].url}, before: " in changed.message


def read_config(flags: RunFlags, file: Path) -> RunConfig:
    options = merge_flags(flags, file)
    del options["agent"], options["command"]
    return prepare("demo", "nop", file.parent / "out", options).config  # type: ignore[arg-type]


def test_a_file_has_tables_where_the_command_line_has_urls(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TABLES)
    config = read_config(RunFlags(), file)

    second = ServerEndpoint(
        url="http://127.0.0.1:9002/v1", weight=2, key="NODE_KEY", models=("big-*", "tiny-4b")
    )
    assert config.base_url == (ServerEndpoint(url="http://127.0.0.1:9001/v1"), second)
    assert config.model_map == {"small": "tiny-4b"}
    flags = RunFlags(base_url=["http://one/v1"], model_map=["small=x", "*haiku*=y"])  # type: ignore[call-arg]
    config = read_config(flags, file)
    assert (config.base_url, config.model_map) == ("http://one/v1", {"small": "x", "*haiku*": "y"})


def test_a_single_url_in_a_file_is_still_a_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "m"\nbase-url = "http://one/v1"\n')

    assert merge_flags(RunFlags(), file)["base_url"] == "http://one/v1"


def test_a_worker_that_is_gone_leaves_its_calls_and_not_its_state() -> None:
    tally = EndpointTally()
    tally.add(1, (EndpointUse(url="a", requests=3), EndpointUse(url="b", requests=1)))
    down = EndpointUse(url="a", requests=2, failures=2, state=EndpointState.DOWN, error="refused")
    tally.add(2, (down, EndpointUse(url="b", requests=4)))

    assert tally.sum_up()[0] == EndpointUse(
        url="a", requests=5, failures=2, state=EndpointState.DOWN, error="refused"
    )
    tally.forget(2)
    assert tally.sum_up() == (
        EndpointUse(url="a", requests=5, failures=2),
        EndpointUse(url="b", requests=5),
    )


def test_a_server_has_metrics_by_url() -> None:
    uses = (
        EndpointUse(url="http://a/v1", requests=7, failures=2, state=EndpointState.DOWN),
        EndpointUse(url="http://b/v1", requests=5),
    )
    health = ServerHealth(ok=True, state="serving")
    text = render_metrics(ServerStats(at=0.0, uptime=1.0, health=health, endpoints=uses)).decode()

    seen = {
        (sample.name, sample.labels["url"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "url" in sample.labels
    }
    assert seen["holdwater_endpoint_calls_total", "http://a/v1"] == 7
    assert seen["holdwater_endpoint_failures_total", "http://a/v1"] == 2
    assert (seen["holdwater_endpoint_ok", "http://a/v1"], seen["holdwater_endpoint_ok", "http://b/v1"]) == (
        0,
        1,
    )
