"""A sandbox server with a docker daemon: the containers of a run elsewhere, which reach its gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene, serving, until
from tests.container_runs import IMAGE, Ground
from tests.docker.test_container_run_parity import KINDS, LIMITS
from tests.sandbox_server import ServedSandboxes, sandbox_server

CALLS = """
import json
import holdwater as hw

ASK = '''
import json, sys, urllib.request
url, key = sys.argv[1:]
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body, headers)) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"])
'''

def instances():
    for n in range(3):
        yield hw.Instance(id=f"i{n}", files={"ask.py": ASK})

async def grade(instance, sandbox, answer):
    return answer == "policy:hello" and (await sandbox.run("cat said")).stdout.strip() == answer

async def solve(instance, sandbox, model):
    asked = await sandbox.run(f"python3 ask.py {model.sandbox_url} {model.key} | tee said")
    return asked.stdout.strip() or asked.stderr

suite = hw.Suite(name="calls", instances=instances, grade=grade)
"""
MODEL = """
import asyncio
from holdwater.testing.scripted_model import ScriptedReply, serve_script

async def main():
    async with serve_script(lambda request: ScriptedReply(text="policy:hello")) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

START = """
import os, sys
os.execvp({before!r}[0], [*{before!r}, sys.executable, {file!r}])  # in the network of the daemon
"""


@pytest.fixture
def server(tmp_path: Path, ground: Ground) -> Iterator[ServedSandboxes]:
    env = {"DOCKER_HOST": ground.host, "HOLDWATER_CACHE": str(tmp_path / "cache")}
    words = ("--sandbox", "docker", "--client-grace", "2")
    with sandbox_server(tmp_path / "there", *words, before=ground.before, env=env) as served:
        yield served
        served.command.signal(15)
        assert served.command.wait() == 0, served.command
    ground.assert_clean()


def test_every_end_of_an_attempt_is_that_of_a_container_here(
    tmp_path: Path, ground: Ground, server: ServedSandboxes
) -> None:
    found = []
    for name, flags in (("near", ("--sandbox", "docker")), ("remote", server.options())):
        scene = ground.scene(tmp_path / name)
        scene.place.mkdir()
        scene.suite(KINDS)
        command = scene.run(*scene.agent(), *LIMITS, "--image", IMAGE, *flags)
        assert command.wait(120) in (0, 1), command
        keys = ("kind", "where", "failure_kind", "phase", "passed", "score", "answer")
        found.append({row["instance"]: {key: row[key] for key in keys} for row in scene.export("attempts")})
        scene.close()

    assert found[1] == found[0]


def test_model_calls_of_a_container_reach_the_gateway_of_the_run(
    tmp_path: Path, ground: Ground, server: ServedSandboxes
) -> None:
    scene = Scene(tmp_path / "run", network=ground.network)
    scene.place.mkdir()
    scene.suite(CALLS)
    (tmp_path / "model.py").write_text(MODEL)
    scene_words = (*scene.agent(), "--image", IMAGE, *server.options())
    elsewhere = START.format(before=list(ground.before), file=str(tmp_path / "model.py"))
    with serving("-c", elsewhere) as url:
        command = scene.run(*scene_words, "--model", "m", "--base-url", url)
        assert command.wait(120) == 0, command

    assert scene.outcomes() == {f"i{n}": "passed" for n in range(3)}
    scene.close()


def test_a_killed_server_leaves_no_container_after_its_restart(
    tmp_path: Path, ground: Ground, server: ServedSandboxes
) -> None:
    scene = Scene(tmp_path / "run", network=ground.network)
    scene.place.mkdir()
    scene.suite(KINDS.replace('"passes": "echo 4 >answer"', '"waits": "sleep 5; echo 4 >answer"'))
    words = (*scene.agent(), "--image", IMAGE, "--only", "waits", "--retries", "0", "--workers", "1")
    command = scene.run(*words, *server.options())
    until("a container acts", lambda: _acts(ground), every=0.3)

    server.kill()
    server.start()

    assert command.wait(120) == 0, command
    assert scene.outcomes() == {"waits": "passed"}
    scene.close()


def _acts(ground: Ground) -> bool:
    containers = ground.docker("ps", "--quiet").split()
    return any("sleep 5" in ground.docker("top", container) for container in containers)
