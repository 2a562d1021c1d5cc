"""The same suite ends the same in processes and in containers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.container_runs import IMAGE, Ground
from tests.secret_search import found
from tests.wait_bounds import stretch

KINDS = """
import holdwater as hw

LINES = {
    "passes": "echo 4 >answer",
    "fails": "echo 5 >answer",
    "reads": "test $(cat given) = 2 && echo 4 >answer",
    "leaves": "exit 3",
    "raises": "raise",
    "eats": "python3 -c 'x = bytearray(300 * 2**20); x[::4096] = bytes(len(x[::4096]))'; echo 4 >answer",
    "is late": "echo 4 >answer; sleep 100",
    "forks": "f() { f | f & f; }; f",
    "fills": "head -c 200M /dev/zero >big && echo 4 >answer",
    "prints": "yes",
    "is given": 'case "$TOKEN" in tok-*-123456) echo "it is $TOKEN"; echo 4 >answer;; esac',
}


def instances():
    for name, line in LINES.items():
        yield hw.Instance(id=name, instruction=line, files={"given": "2"}, setup="test -e given")


async def solve(instance, sandbox, model):
    if instance.instruction == "raise":
        raise ValueError("on purpose")
    result = await sandbox.run(instance.instruction)
    return {"status": result.exit_code, "here": (await sandbox.read("given")).decode()}


async def grade(instance, sandbox, answer):
    return (await sandbox.run('test -z "$TOKEN" && test $(cat answer) = 4')).ok


suite = hw.Suite(name="kinds", instances=instances, grade=grade)
"""
TOKEN = "tok-Secret-123456"
LIMITS = (
    *("--sandbox-memory", "128MiB", "--sandbox-disk", "64MiB", "--sandbox-pids", "64", "--retries", "0"),
    *("--sandbox-output", "4MiB", "--concurrency", "4", "--env", f"TOKEN={TOKEN}"),
)


@pytest.fixture
def scenes(tmp_path: Path, ground: Ground) -> tuple[Scene, Scene]:
    for name in ("process", "docker"):
        (tmp_path / name).mkdir()
    return Scene(tmp_path / "process"), ground.scene(tmp_path / "docker")


def test_every_end_of_an_attempt_is_the_same_in_both(scenes: tuple[Scene, Scene], ground: Ground) -> None:
    told = []
    for scene, flags in zip(scenes, ((), ("--sandbox", "docker", "--image", IMAGE)), strict=True):
        scene.suite(KINDS)
        command = scene.run(*scene.agent(), *LIMITS, "--timeout", str(stretch(0.75)), *flags)
        assert command.wait(120) in (0, 1), command
        keys = ("kind", "where", "failure_kind", "phase", "passed", "score", "answer")
        told.append({row["instance"]: {key: row[key] for key in keys} for row in scene.export("attempts")})
        assert found("it is env-1-xxxxxxxxxxx", scene.out) and found(TOKEN, scene.out) == []
        scene.close()

    assert told[0] == told[1]
    assert told[0]["is given"]["kind"] == "passed"
    ground.assert_clean()


@pytest.mark.proof
def test_the_demo_ends_the_same_in_both(scenes: tuple[Scene, Scene], ground: Ground) -> None:
    told = []
    for scene, flags in zip(scenes, ((), ("--sandbox", "docker", "--image", IMAGE)), strict=True):
        command = scene.start("run", "demo", "--out", str(scene.out), "--json", *flags)
        assert command.wait(120) == 0, command
        told.append(command.document()["outcomes"])
        scene.close()

    assert told[0] == told[1] and told[0]["passed"] > 5
    ground.assert_clean()
