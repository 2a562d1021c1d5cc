"""Agents that no preset knows, killed with -9 and resumed: each turn that is in the record is paid once.

`scripts/proof-clients` installs them. Each has a small program in `tests/clients` that makes four turns.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Scene, lines, serving, until

from holdwater.sandbox.probe import probe

HERE = Path(__file__).parents[1] / "clients"
INSTALLED = Path(__file__).parents[2] / ".clients"
MODEL = "gpt-5"
TURNS = 4
BEFORE_THE_KILL = 2  # turns that are whole in the record
SUITE = """
import holdwater as hw

def instances():
    yield hw.Instance(id="notes", instruction="Write three notes with the tool, one at a time.")

async def grade(instance, sandbox, answer):
    lines = (await sandbox.read("notes.txt")).decode().split()
    return [line[:7] for line in lines] == ["note-1-", "note-2-", "note-3-"]

suite = hw.Suite(name="clerk", instances=instances, grade=grade)
"""
CLIENTS = {  # client -> the interpreter below `.clients` and the words after it
    "openhands-sdk": ("readers/bin/python", "openhands_agent.py"),
    "pydantic-ai": ("frameworks/bin/python", "pydantic_ai_agent.py", "chat"),
    "pydantic-ai-messages": ("frameworks/bin/python", "pydantic_ai_agent.py", "messages"),
    "pydantic-ai-gemini": ("frameworks/bin/python", "pydantic_ai_agent.py", "gemini"),
    "openai-agents": ("frameworks/bin/python", "openai_agents_agent.py"),
    "langgraph": ("frameworks/bin/python", "langgraph_agent.py"),
    "litellm": ("mini/bin/python", "litellm_agent.py"),
    "smolagents": ("frameworks/bin/python", "smolagents_agent.py"),
    "qwen-code": ("terminals/node_modules/.bin/qwen", "qwen_agent.sh"),
    "cline": ("terminals/node_modules/.bin/cline", "cline_agent.sh"),
}

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not probe().works and os.environ.get("CI") != "true",
        reason=f"bubblewrap does not work here: {probe().why_not}",
    ),
]


def command_of(client: str) -> str:
    """The template of `--command`."""
    program, script, *words = CLIENTS[client]
    there = INSTALLED / program
    if not there.exists():
        assert os.environ.get("CI") != "true", f"not installed: {there}"
        pytest.skip(f"not installed: {there}")
    if script.endswith(".sh"):
        return shlex.join(["sh", str(HERE / script), str(there.parent), "{instruction}"])
    settings = ["LITELLM_LOCAL_MODEL_COST_MAP=True", "OPENHANDS_SUPPRESS_BANNER=1"]
    return shlex.join(["env", *settings, str(there), str(HERE / script), *words, "{instruction}"])


@pytest.mark.parametrize("client", CLIENTS)
def test_turns_in_the_record_are_paid_once(
    scene: Scene, client: str, capsys: pytest.CaptureFixture[str]
) -> None:
    template = command_of(client)
    trace, gate = scene.place / "requests", scene.place / "gate"
    gate.touch()
    scene.suite(SUITE)
    with serving(str(HERE / "counting_model.py"), client, str(trace), str(gate)) as url:
        words = ("--command", template, "--model", MODEL, "--base-url", url, "--retries", "0")
        packages = (
            INSTALLED / CLIENTS[client][0].split("/")[0]
        )  # a sandbox shows programs, not the directory they lie in
        command = scene.run(*words, "--mount", f"{packages}:{packages}", "--workers", "1", "--timeout", "600")
        until("the third turn is asked for", lambda: "turn 3\n" in lines(trace) or not command.running, 500)
        assert command.running, command
        command.kill()
        recorded = [row for row in scene.export("exchanges") if row["status"] == 200]
        asked = len(lines(trace))
        gate.unlink()

        resumed = scene.resume()
        assert resumed.wait(500) == 0, resumed
        assert scene.outcomes() == {"notes": "passed"}, resumed
        summary = resumed.document()
        again = lines(trace)[asked:]
        replayed = scene.start("replay", str(scene.out), "--out", str(scene.place / "again"), "--json")
        assert replayed.wait(500) == 0, replayed

    turns = [row for row in scene.export("exchanges") if row["status"] == 200]
    saved, told = summary["saved"]["requests"], replayed.document()["saved"]["requests"]
    report = (
        f"{client}: killed with {len(recorded)} turns in the record; resumed: {saved} saved,"
        f" {len(again)} asked; replayed: {told} of {len(turns) - len(recorded)} from the record"
    )
    with capsys.disabled():
        sys.stdout.write(f"\n{report}\n")
    assert lines(trace)[:asked].count("turn 3\n") == 1, report
    assert [line for line in again if line != "side\n"] == ["turn 3\n", "turn 4\n"], report
    assert saved == len(recorded) >= BEFORE_THE_KILL, report
    assert_replayed(replayed.document(), turns, report)
    assert len(lines(trace)) == asked + len(again), report


def assert_replayed(summary: dict[str, Any], turns: list[dict[str, Any]], report: str) -> None:
    """A replay asks nobody, and every request is one that is in the record."""
    last = max(row["attempt"] for row in turns)
    made = sum(row["attempt"] == last for row in turns)
    assert made >= TURNS, report
    assert summary["saved"]["requests"] == made, report
    assert summary["usage"]["requests"] == 0, report
    assert summary["events"].get("replay.drifted", 0) == 0, report
