"""The model's servers and the conductor are killed with -9 in turn: no turn is lost or paid twice."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import SOURCE, Scene, lines, until
from tests.forked_command import ForkedCommand
from tests.talking_suite import SUITE

from holdwater.ledger.durable_files import replace_file

INSTANCES, TURNS = 6, 10
AT_ONCE = 3

MODEL = """
import asyncio, secrets, sys
from holdwater.testing.scripted_model import ScriptedReply, serve_script

name, trace, port = sys.argv[1:]

def say(request):
    text = f"{name} {secrets.token_hex(16)}"
    with open(trace, "a") as file:
        file.write(text + "\\n")
    return ScriptedReply(text=text)

async def main():
    async with serve_script(say, int(port)) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class ServerProcess:
    """A server of the model in a process of its own, on the same port each time."""

    def __init__(self, name: str, trace: Path) -> None:
        self.name = name
        self.url = ""
        self._trace = trace
        self._process: ForkedCommand | None = None

    def start(self) -> None:
        port = self.url.removesuffix("/v1").rpartition(":")[2] or "0"
        ours, theirs = os.pipe()
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        with os.fdopen(ours) as told:
            try:
                words = ("-c", MODEL, self.name, str(self._trace), port)
                self._process = ForkedCommand(words, theirs, 2, env=env, program=True)
            finally:
                os.close(theirs)
            self.url = told.readline().strip()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[ServerProcess]]:
    started = [ServerProcess(name, tmp_path / "said") for name in ("one", "two")]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


def test_killed_servers_and_a_killed_conductor_cost_no_turn(
    scene: Scene, servers: list[ServerProcess]
) -> None:
    one, two = servers
    trace, limit, said = (scene.place / name for name in ("received", "limit", "said"))
    scene.suite(SUITE, TRACE=str(trace), LIMIT=str(limit), INSTANCES=INSTANCES, TURNS=TURNS)
    limit.write_text("0")

    def go_on(count: int) -> list[str]:
        """Let the agents receive so many more replies; return them."""
        before = len(lines(trace))
        replace_file(limit, f"{before + count}".encode())
        until("replies were received", lambda: len(lines(trace)) >= before + count)
        return lines(trace)[before:]

    options = ("--model", "model", "--base-url", one.url, "--base-url", two.url, "--workers", "2")
    command = scene.run(*scene.agent(), *options, "--retries", "100", "--concurrency", str(AT_ONCE))
    begun = go_on(9)
    assert {text.split()[0] for text in begun} == {"one", "two"}, "both get conversations"
    one.kill()
    go_on(AT_ONCE)
    moved = go_on(9)
    assert {text.split()[0] for text in moved} == {"two"}
    kept = (scene.out / "run.json").read_bytes()
    command.kill()
    one.start()
    two.kill()
    before = len(lines(said))
    command = scene.resume()
    while len(lines(said)) < before + 9:
        go_on(AT_ONCE)  # some of it from the record
    assert {text.split()[0] for text in lines(said)[before:]} == {"one"}
    two.start()
    replace_file(limit, b"1000000")
    assert command.wait(120) == 0, command

    assert set(scene.outcomes().values()) == {"passed"}
    assert {text.strip() for text in lines(trace)} <= set(map(text_of, scene.export("exchanges")))
    assert_paid_once(scene, command.document(), cut=3)
    assert json.loads(kept)["base_url"] == [{"url": one.url}, {"url": two.url}]
    assert (scene.out / "run.json").read_bytes() == kept, "the resume keeps its servers"
    uses = {use["url"]: use for use in command.document()["endpoints"]}
    assert list(uses) == [one.url, two.url]
    assert uses[two.url]["failures"] > 0, "the resumed run found it dead"


def assert_paid_once(scene: Scene, summary: Any, cut: int) -> None:
    exchanges = scene.export("exchanges")
    bought = Counter(text_of(row) for row in exchanges if row["usage"]["requests"] and row["status"] == 200)
    assert bought and set(bought.values()) == {1}
    # Asked again was only what was on its way when a server or the conductor was killed.
    asked = len(lines(scene.place / "said"))
    assert INSTANCES * TURNS <= len(bought) <= asked <= INSTANCES * TURNS + cut * AT_ONCE
    assert summary["saved"]["requests"] == sum(row["saved"]["requests"] for row in exchanges) > 0
    assert summary["usage"]["requests"] == sum(row["usage"]["requests"] for row in exchanges)


def text_of(row: dict[str, Any]) -> str:
    choices = (row["reply"] or {}).get("choices")
    return str(choices[0]["message"]["content"]) if choices else ""
