"""kill -9 at any turn: what an agent had received in full is in the record, and is not paid for again."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, lines, serving, until
from tests.talking_suite import SUITE

from holdwater.ledger.durable_files import replace_file

INSTANCES, TURNS = 6, 12
AT_ONCE = 3

MODEL = """
import asyncio, secrets, sys
from holdwater.testing.scripted_model import ScriptedReply, serve_script

def say(request):
    text = secrets.token_hex(16)
    with open(sys.argv[1], "a") as trace:
        trace.write(text + "\\n")
    return ScriptedReply(text=text)

async def main():
    async with serve_script(say) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def model(tmp_path: Path) -> Iterator[str]:
    """A model that never says the same twice; `said` has all that it said."""
    with serving("-c", MODEL, str(tmp_path / "said")) as url:
        yield url


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(4, 3), pytest.param(30, 5, marks=pytest.mark.proof)],
)
def test_what_was_received_is_in_the_record_and_is_not_paid_twice(
    scene: Scene, model: str, kills: int, seed: int
) -> None:
    chance = random.Random(seed)
    trace, limit = scene.place / "received", scene.place / "limit"
    scene.suite(SUITE, TRACE=str(trace), LIMIT=str(limit), INSTANCES=INSTANCES, TURNS=TURNS)
    limit.write_text("0")
    options = ("--model", "model", "--base-url", model, "--workers", "2", "--retries", "100")
    command = scene.run(*scene.agent(), *options, "--concurrency", str(AT_ONCE))
    cut = 0
    for _ in range(kills):
        seen = len(lines(trace)) + chance.randint(1, 12)  # four times that, and nothing has ended
        replace_file(limit, f"{seen + AT_ONCE}".encode())
        until("a reply was received", lambda: len(lines(trace)) >= seen or not command.running)  # noqa: B023
        if not command.running:
            break
        cut += 1
        if cut == 2 and (workers := scene.workers()):
            os.kill(chance.choice(workers).pid, signal.SIGKILL)
            continue
        command.kill()
        assert received(trace) <= recorded(scene)
        command = scene.resume()

    replace_file(limit, b"1000000")
    assert command.wait(120) == 0, command
    assert cut >= min(kills, 4)
    assert set(scene.outcomes().values()) == {"passed"}
    assert received(trace) <= recorded(scene)
    assert_paid_once(scene, command.document(), cut)


def assert_paid_once(scene: Scene, summary: Any, cut: int) -> None:
    exchanges = scene.export("exchanges")
    bought = Counter(text(row) for row in exchanges if row["usage"]["requests"] and row["status"] == 200)
    assert bought and set(bought.values()) == {1}
    # Asked again was only what was on its way when a process was killed.
    asked = len(lines(scene.place / "said"))
    assert INSTANCES * TURNS <= len(bought) <= asked <= INSTANCES * TURNS + cut * AT_ONCE
    assert summary["saved"]["requests"] == sum(row["saved"]["requests"] for row in exchanges) > 0
    assert summary["usage"]["requests"] == sum(row["usage"]["requests"] for row in exchanges)


def received(trace: Path) -> set[str]:
    return {line.strip() for line in lines(trace)}


def recorded(scene: Scene) -> set[str]:
    return {text(row) for row in scene.export("exchanges") if row["reply"]}


def text(row: dict[str, Any]) -> str:
    choices = (row["reply"] or {}).get("choices")
    return str(choices[0]["message"]["content"]) if choices else ""
