"""Conversations of the real OpenHands SDK: in the worker with tools in the sandbox, and in the sandbox.

`scripts/clients` installs the SDK, beside what holdwater needs, into an environment with a newer Python.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.command_runner import SOURCE
from tests.sandbox_server import sandbox_server
from tests.wait_bounds import stretch

import holdwater as hw
from holdwater.export.formats import export_run
from holdwater.sandbox.probe import probe
from holdwater.sandbox.scratch import temporary_prefix
from holdwater.testing.scripted_model import ScriptedReply, serve_script

pytestmark = pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)

PYTHON = Path(__file__).parents[2] / ".clients/readers/bin/python"
WORK = "/run/holdwater/work"
MOST = 24  # iterations of a conversation
STEPS: list[tuple[str, dict[str, Any]]] = [
    ("terminal", {"command": "pwd; export X=7; cd /tmp; false"}),
    ("terminal", {"command": f"echo [$X]; pwd; cd {WORK}; nosuchcommand"}),
    (
        "terminal",
        {"command": "cat >b.txt <<'END'\none $X\n\"two\"\nEND\nchmod 755 b.txt; cat b.txt"},
    ),
    ("file_editor", {"command": "create", "path": f"{WORK}/a.py", "file_text": "x = 1\ny = 2\n"}),
    (
        "file_editor",
        {"command": "str_replace", "path": f"{WORK}/a.py", "old_str": "y = 2", "new_str": "y = 3"},
    ),
    ("file_editor", {"command": "undo_edit", "path": f"{WORK}/a.py"}),
    ("file_editor", {"command": "insert", "path": f"{WORK}/b.txt", "insert_line": 0, "new_str": "zero"}),
    ("file_editor", {"command": "view", "path": WORK}),
    ("file_editor", {"command": "view", "path": f"{WORK}/no/such"}),
    ("file_editor", {"command": "create", "path": f"{WORK}/no/such", "file_text": "x"}),
    ("file_editor", {"command": "view", "path": "a.py"}),
    ("file_editor", {"command": "view", "path": "/etc/hostname"}),
    ("task_tracker", {"command": "plan", "task_list": [{"title": "first", "notes": "", "status": "todo"}]}),
    ("terminal", {"command": "sed -u 's/^/got /'", "timeout": 1}),
    ("terminal", {"command": "typed", "is_input": True, "timeout": 1}),
    ("terminal", {"command": "C-c", "is_input": True}),
    ("terminal", {"command": "seq 1 20000 | sed 's/$/ a long line of output/'"}),
    ("terminal", {"command": "exit 3"}),
    ("terminal", {"command": "pwd; echo [$X]"}),
    ("terminal", {"command": "ls -l b.txt | cut -c 1-10; cat b.txt; cat a.py"}),
    ("finish", {"message": "all done"}),
]
ALIKE = (0, 1, 3, 4, 5, 6, 7, 8, 10, 11, 12, 18, 19)  # steps with the same result everywhere
TASKS = [
    {
        "id": name,
        "instruction": f"conversation {name}",
        "grade": "grep -q zero b.txt && grep -qx 'y = 2' a.py",
    }
    for name in ("first", "second", "endless")
]


class PlayedRun(NamedTuple):
    path: Path
    id: str
    observed: dict[str, list[str]]  # conversation -> what its tools returned
    asked: int
    replayed: dict[str, Any]
    stderr: str


class ScriptedSteps:
    """A model that takes every conversation through the steps, and never ends the one that is `endless`."""

    def __init__(self) -> None:
        self.observed: dict[str, list[str]] = defaultdict(list)
        self.asked = 0

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        self.asked += 1
        messages = request["messages"]
        text = json.dumps(messages[1])
        name = next(task["id"] for task in TASKS if f"conversation {task['id']}" in text)
        results = [read_text(message) for message in messages if message["role"] == "tool"]
        self.observed[name] = results
        number = len(results)
        if name == "endless":
            tool, arguments = "terminal", {"command": f"echo {number}"}
        else:
            tool, arguments = STEPS[number]
        return ScriptedReply(tool_calls=[{"name": tool, "arguments": arguments, "id": f"call_{number}"}])


def read_text(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def need_sdk() -> None:
    if not PYTHON.exists():
        reason = "the OpenHands SDK is not installed: `scripts/clients` says why"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


async def run_holdwater(place: Path, *words: str) -> tuple[str, str]:
    """Run the command in the SDK's environment; return its output."""
    process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        "-m",
        "holdwater",
        *words,
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_API_KEY": "sk-none"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), stretch(300))
    return out.decode(), err.decode()


async def play(place: Path, *options: str) -> PlayedRun:
    model = ScriptedSteps()
    (place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    async with serve_script(model) as url:
        words = ("run", "tasks.jsonl", "--agent", "openhands-sdk", "--model", "test-model", "--base-url", url)
        bounds = ("--workers", "1", "--retries", "0", "--timeout", str(stretch(200)), "--out", "run")
        most = ("--agent-option", f"max_iterations={MOST}")
        _, stderr = await run_holdwater(place, *words, *bounds, *most, *options)
    out, _ = await run_holdwater(place, "replay", "run", "--out", "again", "--json")
    run = place / "run"
    identity = json.loads((run / "run.json").read_text())["id"]
    return PlayedRun(run, identity, model.observed, model.asked, json.loads(out), stderr)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedRun]:
    """Three conversations at once in one worker, and their replay."""
    need_sdk()
    yield asyncio.run(play(tmp_path_factory.mktemp("sdk")))


def list_attempts(run: Path) -> dict[str, dict[str, Any]]:
    out = io.BytesIO()
    export_run(run, "attempts", "jsonl", out)
    return {row["instance"]: row for row in map(json.loads, out.getvalue().splitlines())}


def test_work_and_answer_of_a_conversation_are_graded(played: PlayedRun) -> None:
    attempts = list_attempts(played.path)

    assert {name: row["kind"] for name, row in attempts.items()} == {
        "first": "passed",
        "second": "passed",
        "endless": "failed",
    }, (attempts, played.stderr)
    assert json.loads(attempts["first"]["answer"]) == "all done"


def test_the_most_iterations_are_a_failure_of_its_own(played: PlayedRun) -> None:
    endless = list_attempts(played.path)["endless"]

    assert (endless["failure_kind"], endless["failure"]) == ("turns", f"not done after {MOST} iterations")


def test_the_terminal_is_one_bash_in_the_sandbox(played: PlayedRun) -> None:
    seen = played.observed["first"]

    assert seen[0].startswith(f"{WORK}\n[The command completed with exit code 1.]")
    assert seen[1].startswith("[7]\n/tmp\nbash: nosuchcommand: command not found\n")
    assert "[The command completed with exit code 127.]" in seen[1]
    assert seen[2].startswith('one $X\n"two"\n[The command completed')
    assert "[The command timed out after 1.0 seconds." in seen[13]
    assert "got typed" in seen[14]
    assert "exit code 130. CTRL+C was sent.]" in seen[15]
    assert seen[16].startswith("1 a long line") and "20000 a long line" in seen[16] and len(seen[16]) < 40_000
    assert "The shell of the terminal has ended" in seen[17]
    assert seen[18].startswith(f"{WORK}\n[]\n")


def test_the_editor_edits_files_of_the_sandbox(played: PlayedRun) -> None:
    seen = played.observed["first"]

    assert seen[3] == f"File created successfully at: {WORK}/a.py"
    assert f"The file {WORK}/a.py has been edited." in seen[4] and "     2\ty = 3" in seen[4]
    assert "undone successfully" in seen[5]
    assert "     1\tzero" in seen[6]
    assert f"{WORK}/\n{WORK}/a.py\n{WORK}/b.txt" in seen[7]
    assert f"The path {WORK}/no/such does not exist" in seen[8]
    assert "missing directory" in seen[9]
    assert f"Maybe you meant {WORK}/a.py?" in seen[10]
    assert "`cat -n` on /etc/hostname" in seen[11]
    assert seen[19].startswith('-rwxr-xr-x\nzero\none $X\n"two"\nx = 1\ny = 2\n')  # the mode is kept


def test_no_path_of_the_mirror_reaches_the_model(played: PlayedRun) -> None:
    assert not any("mirror" in text for texts in played.observed.values() for text in texts)
    assert played.observed["first"] == played.observed["second"]
    assert list(Path(tempfile.gettempdir()).glob(f"{temporary_prefix(played.id)}*")) == []


def test_a_replay_asks_the_same_and_calls_no_model(played: PlayedRun) -> None:
    replayed = played.replayed

    assert replayed["usage"]["requests"] == 0, replayed
    assert replayed["saved"]["requests"] == played.asked
    assert replayed["events"].get("replay.drifted", 0) == 0


@pytest.mark.proof
async def test_tools_see_the_same_in_a_remote_sandbox(tmp_path: Path, played: PlayedRun) -> None:
    """The conversations stay in the worker: only their tools act on the server."""
    with sandbox_server(tmp_path / "there") as server:
        remote = await play(tmp_path, *server.options(), "--network", "none")
        server.assert_clean()

    kinds = {name: row["kind"] for name, row in list_attempts(remote.path).items()}
    assert kinds == {"first": "passed", "second": "passed", "endless": "failed"}, remote.stderr
    for number in ALIKE:
        assert remote.observed["first"][number] == played.observed["first"][number]


@pytest.mark.proof
async def test_a_conversation_in_its_sandbox_sees_the_same(tmp_path: Path, played: PlayedRun) -> None:
    """There the SDK's own executors act, with a terminal in tmux or without."""
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASKS[0]) + "\n")
    model = ScriptedSteps()
    async with serve_script(model) as url:
        summary = await hw.arun(
            str(tmp_path / "tasks.jsonl"),
            "openhands-sdk",
            out=tmp_path / "run",
            model="test-model",
            base_url=url,
            workers=1,
            retries=0,
            timeout=stretch(200),
            agent_option={"python": str(PYTHON), "max_iterations": MOST},
        )

    assert summary.outcomes == {"passed": 1}, list_attempts(tmp_path / "run")
    assert json.loads(list_attempts(tmp_path / "run")["first"]["answer"]) == "all done"
    for number in ALIKE:
        assert model.observed["first"][number] == played.observed["first"][number]
