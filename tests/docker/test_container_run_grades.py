"""Agents in containers that do no work and tamper with their grading: processes, programs, other files."""

from __future__ import annotations

from pathlib import Path

from tests.container_runs import IMAGE, Ground
from tests.harbor_tasks import task

RETRIES = ("--sandbox", "docker", "--retries", "0", "--workers", "1")
SLOW = """
echo 0 > /logs/verifier/reward.txt
sleep 1
"""
PLAIN = """
import holdwater as hw

TRICKS = {
    "program": "cp /bin/true /usr/local/bin/grep; cp /bin/true /bin/grep",
    "temporary": "echo good > /tmp/answer",
    "process": "(setsid sh -c 'while :; do test -e graded && echo good > answer; sleep 0.05; done' "
    "> /dev/null 2>&1 &)",
    "written": "",
    "work": "echo good > answer",
}


def instances():
    for name, line in TRICKS.items():
        yield hw.Instance(id=name, instruction=line, setup="mkdir -p /srv/data; echo set-up > /srv/data/kept")


async def solve(instance, sandbox, model):
    if instance.id == "written":
        await sandbox.write("/bin/grep", b"#!/bin/sh\\nexit 0\\n")
        return
    await sandbox.run(instance.instruction)
    await sandbox.run("echo agent > /srv/data/kept")


async def grade(instance, sandbox, answer):
    assert (await sandbox.run("cat /srv/data/kept")).output.strip() == "set-up"
    await sandbox.run("touch graded; sleep 0.5")
    return (await sandbox.run("grep -q good answer /tmp/answer 2> /dev/null")).ok


suite = hw.Suite(name="plain", instances=instances, grade=grade)
"""
SERVICE = """
import holdwater as hw

async def serve(instance, sandbox, model):
    await sandbox.run("(setsid sh -c 'while :; do date > /srv/beat; sleep 0.05; done' > /dev/null 2>&1 &)")
"""


def test_a_process_that_stays_behind_does_not_rewrite_the_reward(ground: Ground, tmp_path: Path) -> None:
    task(tmp_path / "tree" / "one", f'[environment]\ndocker_image = "{IMAGE}"\n', tests__test_sh=SLOW)
    scene = ground.scene(tmp_path)
    words = ("--agent", "attack:background", *RETRIES)

    command = scene.start("run", str(tmp_path / "tree"), "--out", str(scene.out), "--json", *words)

    assert command.wait(200) == 0, command
    assert scene.outcomes() == {"one": "failed"}
    ground.assert_clean()
    scene.close()


def test_a_service_of_the_agent_runs_on_where_the_suite_says_so(ground: Ground, tmp_path: Path) -> None:
    verify = "rm -f /srv/beat; sleep 1; [ -e /srv/beat ] && reward 1 || reward 0"
    task(tmp_path / "tree" / "one", f'[environment]\ndocker_image = "{IMAGE}"\n', tests__test_sh=verify)
    task(tmp_path / "tree" / "two", f'[environment]\ndocker_image = "{IMAGE}"\n', tests__test_sh=verify)
    scene = ground.scene(tmp_path)
    scene.suite(SERVICE)
    suite = f"harbor:{tmp_path / 'tree'}?keep-processes=o*"

    command = scene.start("run", suite, "--out", str(scene.out), "--json", *scene.agent("serve"), *RETRIES)

    assert command.wait(200) == 0, command
    assert scene.outcomes() == {"one": "passed", "two": "failed"}
    details = {row["instance"]: row["detail"] for row in scene.export("attempts")}
    assert "keep-processes" in details["two"] and "keep-processes" not in details["one"]
    ground.assert_clean()
    scene.close()


def test_work_is_graded_in_a_container_of_its_own(ground: Ground, tmp_path: Path) -> None:
    scene = ground.scene(tmp_path)
    scene.suite(PLAIN)

    command = scene.run(*scene.agent(), "--image", IMAGE, "--concurrency", "2", *RETRIES)

    assert command.wait(300) == 0, command
    first = scene.outcomes()
    held = dict.fromkeys(("program", "temporary", "process", "written"), "failed")
    assert first == {**held, "work": "passed"}
    regrade = scene.start("regrade", str(scene.out), "--json")
    assert regrade.wait(300) == 0, regrade
    assert scene.outcomes() == first
    ground.assert_clean()
    scene.close()


def test_an_attack_on_a_shared_verifier_names_what_passes(ground: Ground, tmp_path: Path) -> None:
    verify = "echo 0 > /logs/verifier/reward.txt\npython3 -c 'pass'\n"
    task(tmp_path / "tree" / "one", f'[environment]\ndocker_image = "{IMAGE}"\n', tests__test_sh=verify)
    scene = ground.scene(tmp_path)

    words = ("--attack", str(tmp_path / "tree"), "--sandbox", "docker", "--workers", "0", "--json")
    command = scene.start("check", *words)

    assert command.wait(500) == 1, command
    passed = {trick["name"] for trick in command.document()["tricks"] if trick["passed"]}
    assert "path-shadow" in passed, "root replaces programs of a container that the verifier shares"
    assert not passed & {"background", "usercustomize", "replaced-tests", "deleted-tests"}, passed
    ground.assert_clean()
    scene.close()
