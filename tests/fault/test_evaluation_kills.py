"""An evaluation of OpenHands' benchmarks whose run is killed with -9 in mid-conversation, and resumed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.export_readers import PYTHON, QUIET
from tests.wait_bounds import stretch

from holdwater.ledger.reader import LedgerReader
from holdwater.sandbox.probe import probe
from holdwater.testing.scripted_model import ReplyFault, ScriptedReply, serve_script

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
SPEC = "openhands:benchmarks.notes.run_infer:NotesEvaluation"
COUNT = 6

pytestmark = [
    pytest.mark.proof,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (probe().works and PYTHON.exists()) and os.environ.get("CI") != "true",
        reason="bubblewrap or OpenHands' SDK is missing",
    ),
]


class GatedModel:
    """Replies to every instance with two actions and an end; the end is held back until it is opened."""

    def __init__(self) -> None:
        self.turns: Counter[tuple[str, int]] = Counter()
        self.is_open = False
        self.held = 0

    def __call__(self, request: dict[str, Any]) -> ScriptedReply:
        messages = request["messages"]
        first = next(message for message in messages if message["role"] == "user")["content"]
        _, story, _, place = (first if isinstance(first, str) else first[0]["text"]).split()[:4]
        turn = sum(message["role"] == "assistant" for message in messages)
        self.turns[story, turn] += 1
        if turn == 2 and not self.is_open:
            self.held += 1
            return ScriptedReply(fault=ReplyFault.STALL)
        call = [
            {"name": "terminal", "arguments": {"command": f"cd {place} && echo two >>notes.txt"}},
            {"name": "terminal", "arguments": {"command": "echo $RANDOM | tee -a notes.txt"}},
            {"name": "finish", "arguments": {"message": "noted"}},
        ][turn]
        return ScriptedReply(tool_calls=[{**call, "id": f"call_{turn}"}])


def start(place: Path, *words: str) -> subprocess.Popen[bytes]:
    path = f"{ROOT / 'src'}:{CLIENTS / 'openhands_benchmarks'}"
    env = {**os.environ, **QUIET, "PYTHONPATH": path, "NOTES_COUNT": str(COUNT)}
    with (place / f"{words[0]}.log").open("wb") as log:
        command = [str(PYTHON), "-m", "holdwater", *words]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=place)


async def wait_for(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), stretch(300))


async def test_a_killed_evaluation_is_resumed_without_paying_turns_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = GatedModel()
    async with serve_script(model) as url:
        words = ("run", SPEC, "--model", "storyteller", "--base-url", url, "--out", "run", "--workers", "1")
        run = start(tmp_path, *words, "--timeout", "600")
        async with asyncio.timeout(stretch(200)):
            while model.held < COUNT:
                assert run.poll() is None, (tmp_path / "run.log").read_text()
                await asyncio.sleep(0.1)
        run.kill()
        await wait_for(run)
        asked = model.turns.total()
        model.is_open = True

        resumed = start(tmp_path, "resume", "run")
        assert await wait_for(resumed) == 0, (tmp_path / "resume.log").read_text()

    with LedgerReader(tmp_path / "run") as reader:
        summary = reader.summary()
    with capsys.disabled():
        sys.stdout.write(f"\n{COUNT} evaluations killed after {asked} calls: {model.turns.total()} in all\n")
    assert summary.outcomes == {"passed": COUNT}
    assert all(model.turns[f"finish-{n}", turn] == 1 for n in range(COUNT) for turn in (0, 1)), model.turns
    assert summary.saved.requests == 2 * COUNT
