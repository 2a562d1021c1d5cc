"""Conversations of the OpenHands SDK in a worker, killed with -9 and resumed: each turn is paid once."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import SOURCE, lines, serving, until
from tests.wait_bounds import stretch

from holdwater.export.formats import export_run
from holdwater.sandbox.probe import probe

MODEL = Path(__file__).parents[1] / "clients/counting_model.py"
PYTHON = Path(__file__).parents[2] / ".clients/readers/bin/python"
SUITE = """
import holdwater as hw

def instances():
    yield hw.Instance(id="notes", instruction="Write three notes, one at a time.")

async def grade(instance, sandbox, answer):
    lines = (await sandbox.read("notes.txt")).decode().split()
    return [line[:7] for line in lines] == ["note-1-", "note-2-", "note-3-"]

suite = hw.Suite(name="clerk", instances=instances, grade=grade)
"""

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        not probe().works and os.environ.get("CI") != "true",
        reason=f"bubblewrap does not work here: {probe().why_not}",
    ),
]


@contextmanager
def start(place: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `holdwater` in the SDK's environment, in a process group of its own."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OPENAI_API_KEY": "sk-none"}
    command = [str(PYTHON), "-m", "holdwater", *words]
    process = subprocess.Popen(
        command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def finish(place: Path, *words: str) -> dict[str, Any]:
    with start(place, *words, "--json") as process:
        output, errors = process.communicate(timeout=stretch(300))
    assert process.returncode == 0, errors.decode()
    document: dict[str, Any] = json.loads(output)
    return document


def count_recorded(run: Path) -> int:
    out = io.BytesIO()
    export_run(run, "exchanges", "jsonl", out)
    return sum(json.loads(line)["status"] == 200 for line in out.getvalue().splitlines())


def test_turns_of_a_killed_conversation_are_paid_once(tmp_path: Path) -> None:
    if not PYTHON.exists():
        assert os.environ.get("CI") != "true", f"not installed: {PYTHON}"
        pytest.skip(f"not installed: {PYTHON}")
    (tmp_path / "suite.py").write_text(SUITE)
    trace, gate = tmp_path / "requests", tmp_path / "gate"
    gate.touch()
    with serving(str(MODEL), "openhands-worker", str(trace), str(gate)) as url:
        words = ("run", "suite.py:suite", "--agent", "openhands-sdk", "--model", "gpt-5", "--base-url", url)
        with start(tmp_path, *words, "--workers", "1", "--retries", "0", "--out", "run") as process:
            until("the third turn", lambda: "turn 3\n" in lines(trace) or process.poll() is not None, 300)
            assert process.poll() is None, process.communicate()
            os.killpg(process.pid, signal.SIGKILL)
        recorded, asked = count_recorded(tmp_path / "run"), len(lines(trace))
        gate.unlink()

        summary = finish(tmp_path, "resume", "run")
        again = lines(trace)[asked:]
        replayed = finish(tmp_path, "replay", "run", "--out", "again")

    assert recorded == 2
    assert summary["outcomes"] == {"passed": 1}, summary
    assert summary["saved"]["requests"] == recorded
    assert again == ["turn 3\n", "turn 4\n"]
    assert (replayed["usage"]["requests"], replayed["saved"]["requests"]) == (0, 4)
