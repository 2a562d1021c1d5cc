"""Conversations of the OpenHands SDK in the worker, whose tools act in containers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.command_runner import serving
from tests.container_runs import IMAGE, ROOT, Ground
from tests.live.test_openhands_sdk import ALIKE, MOST, PYTHON, TASKS, WORK, PlayedRun, need_sdk, played
from tests.wait_bounds import stretch

__all__ = ["played"]

SUITE = """
import holdwater as hw

def instances():
    start = hw.SandboxSpec(image=IMAGE, workdir=WORK, directories=(WORK,))
    for task in TASKS:
        yield hw.Instance(id=task["id"], instruction=task["instruction"], data=task, start=start)

async def grade(instance, sandbox, answer):
    return (await sandbox.run(instance.data["grade"])).ok

suite = hw.Suite(name="conversations", instances=instances, grade=grade)
"""
MODEL = """
import asyncio, json, pathlib, sys
sys.path.insert(0, {root!r})
from holdwater.testing.scripted_model import serve_script
from tests.live.test_openhands_sdk import ScriptedSteps

model = ScriptedSteps()

def answer(request):
    reply = model(request)
    pathlib.Path({seen!r}).write_text(json.dumps(model.observed))
    return reply

async def main():
    async with serve_script(answer) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
INSIDE = """
import os
os.execvp({before!r}[0], [*{before!r}, {python!r}, {file!r}])  # in the network of the daemon
"""
ITS_OWN = 11  # the step that views the name of the machine

pytestmark = pytest.mark.proof


def test_tools_see_the_same_in_a_container(ground: Ground, tmp_path: Path, played: PlayedRun) -> None:
    need_sdk()
    seen, model = tmp_path / "seen.json", tmp_path / "model.py"
    model.write_text(MODEL.format(root=str(ROOT), seen=str(seen)))
    scene = ground.scene(tmp_path)
    scene.suite(SUITE, TASKS=TASKS, IMAGE=IMAGE, WORK=WORK)
    elsewhere = INSIDE.format(before=list(ground.before), python=sys.executable, file=str(model))
    with serving("-c", elsewhere) as url:
        words = (
            "--agent",
            "openhands-sdk",
            "--model",
            "test-model",
            "--base-url",
            url,
            "--sandbox",
            "docker",
        )
        bounds = ("--workers", "1", "--retries", "0", "--timeout", str(stretch(200)))
        most = ("--agent-option", f"max_iterations={MOST}")
        instead = f'shift; exec {PYTHON} "$@"'  # of the tests' own interpreter
        scene.before = (*ground.before, "sh", "-c", instead, "sh")
        command = scene.run(*words, *bounds, *most)
        assert command.wait(300) == 0, command

    assert scene.outcomes() == {"first": "passed", "second": "passed", "endless": "failed"}
    observed = json.loads(seen.read_text())["first"]
    for number in set(ALIKE) - {ITS_OWN}:
        assert observed[number] == played.observed["first"][number]
    scene.close()
    ground.assert_clean()
