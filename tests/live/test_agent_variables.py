"""The agent gets the variables of `--env`; their values are in nothing that a run writes or prints."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.command_runner import Scene, until
from tests.forked_command import run_forked
from tests.secret_search import export_all, found

import holdwater as hw
from holdwater.testing.scripted_model import ScriptedReply, serve_raw

TOKEN = "tok-Secret-123456"
QUOTED = 'pass "word" \\ and\nmore of it'
VARIABLES = {"TOKEN": TOKEN, "QUOTED": QUOTED, "MODE": "fast"}
WORD = "a-word-of-the-conversation"
LEAK = """
import os, sys, time
for name in ("TOKEN", "QUOTED"):
    value = os.environ[name]
    print("whole", value)
    for piece in (value[:3], value[3:9], value[9:], "\\n"):
        sys.stdout.write(piece)
        sys.stdout.flush()
        time.sleep(0.05)
    open(name, "w").write("x" * 8190 + value + "\\n" + value)
sys.exit("ended with " + os.environ["TOKEN"])
"""


async def test_an_agent_that_prints_its_variables_leaves_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Given an agent that puts the values wherever it can, and a model that repeats them."""
    asked: list[bytes] = []
    graded: list[str] = []

    def answer(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        asked.append(body)
        return ScriptedReply(text=f"{WORD}: run `login {TOKEN}`, {QUOTED}")

    async def solve(instance: hw.Instance, sandbox: hw.AgentSandbox, model: hw.Model) -> dict[str, str]:
        assert dict(sandbox.env) == VARIABLES
        logging.getLogger("agent").warning("logged %s %s", TOKEN, QUOTED)
        await sandbox.write("leak.py", LEAK)
        result = await sandbox.run(["python3", "leak.py"])
        assert TOKEN in result.stdout and QUOTED in result.stdout, result  # the agent sees everything
        assert (await sandbox.run("echo $MODE $TOKEN", env={"TOKEN": "own"})).stdout == "fast own\n"
        content = f"mine are {TOKEN}, {json.dumps(QUOTED)} and {QUOTED}" + "z" * 5000
        for _ in range(2):
            await model.chat([{"role": "user", "content": content}], user=TOKEN)
        raise hw.AgentFailed(f"the login {TOKEN} failed", hint=QUOTED)

    async def look(instance: hw.Instance, sandbox: hw.GradingSandbox) -> None:
        graded.append((await sandbox.run("env")).stdout)

    async def grade(instance: hw.Instance, sandbox: hw.GradingSandbox, answer: object) -> hw.Grade:
        await look(instance, sandbox)
        return hw.Grade(passed=False, score=0.0, detail=f"{WORD}: {TOKEN}")

    suite = hw.Suite(name="leaks", instances=lambda: [hw.Instance(id="one")], setup=look, grade=grade)
    async with serve_raw(answer) as url:
        await hw.arun(
            suite, solve, out=tmp_path / "run", model="m", base_url=url, workers=0, env=VARIABLES, timeout=60
        )
    export_all(tmp_path / "run", tmp_path / "exports", capfd)

    assert TOKEN.encode() in asked[0]  # the model gets everything
    assert len(graded) == 2 and not any(name in text for text in graded for name in VARIABLES)
    assert found(WORD, tmp_path / "run") and found("env-1-xxxxxxxxxxx", tmp_path / "run")
    for secret in (TOKEN, QUOTED, json.dumps(QUOTED)[1:-1], '\\"word\\" '):
        assert found(secret, tmp_path / "run") == []
        assert found(secret, tmp_path / "exports") == []
    assert json.loads((tmp_path / "run" / "run.json").read_text())["env"] == ["TOKEN", "QUOTED", "MODE"]


async def test_a_recorded_reply_has_the_value_again(tmp_path: Path) -> None:
    """Given a first attempt that fails after its call, whose reply repeats the value."""
    asked: list[bytes] = []
    replies: list[str] = []

    def answer(headers: Mapping[str, str], body: bytes) -> ScriptedReply:
        asked.append(body)
        return ScriptedReply(text=f"run `login {TOKEN}`: {QUOTED}")

    async def solve(instance: hw.Instance, sandbox: hw.Sandbox, model: hw.Model) -> None:
        reply = await model.chat([{"role": "user", "content": f"mine is {TOKEN}"}])
        replies.append(reply["choices"][0]["message"]["content"])
        if len(replies) == 1:
            raise hw.ModelFailed("try again")

    suite = hw.Suite(name="again", instances=lambda: [hw.Instance(id="one")], grade=lambda *given: True)
    async with serve_raw(answer) as url:
        summary = await hw.arun(
            suite,
            solve,
            out=tmp_path / "run",
            model="m",
            base_url=url,
            workers=0,
            backoff=0.01,
            env=VARIABLES,
        )

    assert (summary.outcomes, len(asked)) == ({"passed": 1}, 1)
    assert replies == [f"run `login {TOKEN}`: {QUOTED}"] * 2
    assert found(TOKEN, tmp_path / "run") == []


TAKEN = {"TAKEN": "taken-Value-2"}
SUITE = """
import asyncio
from pathlib import Path
import holdwater as hw

def instances():
    yield hw.Instance(id="one")
    yield hw.Instance(id="two")

async def solve(instance, sandbox, model, attempt):
    print("own", sandbox.env)
    await attempt.spawn(work)
    while instance.id == "two" and not GO.exists():
        await asyncio.sleep(0.02)

async def work(instance, sandbox, model):
    await sandbox.run('printf "%s %s" "$GIVEN" "$TAKEN" > values')

async def grade(instance, sandbox, answer):
    hidden = not (await sandbox.run("echo $GIVEN$TAKEN")).stdout.strip()
    return hidden and await sandbox.read("values") == b"given-Value-1 taken-Value-2"

suite = hw.Suite(name="scene", instances=instances, grade=grade)
"""


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    found = Scene(tmp_path, env=TAKEN, interpreter=True)
    found.suite("from pathlib import Path\nGO = Path(" + repr(str(tmp_path / "go")) + ")" + SUITE)
    yield found
    found.close()


def test_a_command_hides_its_values_and_a_resume_needs_them_again(scene: Scene) -> None:
    command = scene.run(*scene.agent(), "--env", "GIVEN=given-Value-1", "--env", "TAKEN", "--workers", "1")
    until(
        "the first instance has passed",
        lambda: (scene.out / "run.json").exists() and "one" in scene.outcomes(),
    )
    pids = [command.pid, *(worker.pid for worker in scene.workers())]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    command.kill()
    (scene.place / "go").touch()

    assert len(lines) == 2 and b"--env\0GIVEN=xxxxxxxxxxxxx\0--env\0TAKEN\0" in lines[0]
    assert not any(b"given-Value-1" in line for line in lines)
    refused = run_forked("resume", str(scene.out), env={**os.environ, **TAKEN})
    assert (refused.returncode, refused.stderr) == (
        2,
        "error: `--env GIVEN`: the variable is not set\n"
        "hint: set it, or give its value: `--env GIVEN=VALUE`; a run keeps no values\n",
    )
    again = scene.start("resume", str(scene.out), "--env=GIVEN=given-Value-1", "--env", "MORE=x", "--quiet")
    assert again.wait() == 0, again
    assert scene.outcomes() == {"one": "passed", "two": "passed"}
    assert found("own {'GIVEN': 'env-1-xxxxxxx', 'TAKEN': 'env-2-xxxxxxx'", scene.out)
    for value in ("given-Value-1", "taken-Value-2"):
        assert found(value, scene.out) == [] and found(value, scene.place / "commands") == []
    assert json.loads((scene.out / "run.json").read_text())["env"] == ["GIVEN", "TAKEN", "MORE"]
    replayed = run_forked("replay", str(scene.out), "--out", str(scene.place / "replay"))
    assert (replayed.returncode, "`--env GIVEN`: the variable is not set" in replayed.stderr) == (2, True)


def test_a_setting_of_a_file_gives_a_variable(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('env = ["GIVEN=given-Value-1"]\nagent = "nop"\nlimit = 1\n')
    words = ("run", "demo", "--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"))

    done = run_forked(*words, "--dry-run", "--json")

    assert json.loads(done.stdout)["config"]["env"] == ["GIVEN"], done.stderr
    assert "given-Value-1" not in done.stdout + done.stderr
