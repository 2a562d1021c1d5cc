"""A conductor or a worker is killed with -9 amid model calls: the cost is what the exchanges add up to."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
from tests.command_runner import Scene, lines, serving, until

SUITE = """
import asyncio
import os

import holdwater as hw


def instances():
    for n in range(6):
        yield hw.Instance(id=f"i{n}")


async def solve(instance, sandbox, model):
    messages = [{"role": "user", "content": "hi"}]
    for turn in range(6):
        reply = await model.chat(messages)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]
        with open(TRACE, "a") as trace:
            trace.write(f"{instance.id} {os.getpid()}\\n")
        while turn == 2 and not os.path.exists(KILLED):
            await asyncio.sleep(0.05)


suite = hw.Suite(name="spending", instances=instances, grade=lambda instance, sandbox, answer: True)
"""


@pytest.fixture
def model() -> Iterator[str]:
    with serving("-m", "holdwater.testing.scripted_model", "--bytes", "400") as url:
        yield url


@pytest.mark.parametrize("killed", ["conductor", "worker"])
def test_the_cost_is_exact_after_a_kill_of_conductor_or_worker(scene: Scene, model: str, killed: str) -> None:
    trace, over, prices = scene.place / "trace", scene.place / "killed", scene.place / "prices.toml"
    prices.write_text('["mo*"]\ninput = 3.0\noutput = 15.0\n')
    scene.suite(SUITE, TRACE=str(trace), KILLED=str(over))
    options = ("--model", "model", "--base-url", model, "--prices", str(prices), "--workers", "2")
    command = scene.run(*scene.agent(), *options, "--concurrency", "4")
    until("four attempts have made three calls", lambda: len(lines(trace)) >= 12)
    if killed == "conductor":
        command.kill()
        over.touch()
        command = scene.resume()
    else:
        os.kill(int(lines(trace)[0].split()[1]), signal.SIGKILL)
        over.touch()
    assert command.wait(90) == 0, command

    summary = command.document()
    exchanges = [row["usage"] for row in scene.export("exchanges")]
    assert len(exchanges) > 36  # the cut attempts' own, too
    assert summary["usage"]["requests"] + summary["saved"]["requests"] == len(exchanges)
    assert summary["saved"]["requests"] > 0  # what had been answered was not paid for again
    assert summary["usage"]["output_tokens"] == sum(used["output_tokens"] for used in exchanges)
    nano = sum(round(used["cost"] * 1e9) for used in exchanges)
    assert summary["usage"]["nanodollars"] == nano > 0
    assert summary["cost"] == nano / 1e9
    attempts = scene.export("attempts")
    assert sum(round(row["cost"] * 1e9) for row in attempts) == nano
    assert json.loads((scene.out / "run.json").read_text())["price"]["output"] == 15.0
