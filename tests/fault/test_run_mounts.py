"""What of this machine an agent's command needs: shown by `--mount`, or one clear error at the start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene

from holdwater.sandbox.probe import probe

AGENT = "#!/bin/sh\necho made by the agent > out.txt\n"


@pytest.fixture(autouse=True)
def bubblewrap() -> None:
    if not probe().works and os.environ.get("CI") != "true":
        pytest.skip(f"bubblewrap does not work here: {probe().why_not}")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    task = {"id": "one", "instruction": "do it", "grade": "grep agent out.txt"}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    tools = tmp_path / "tools" / "bin"
    tools.mkdir(parents=True)
    (tools / "my-agent").write_text(AGENT)
    (tools / "my-agent").chmod(0o755)
    yield scene
    scene.close()


def run(scene: Scene, *words: str) -> Command:
    tasks = str(scene.place / "tasks.jsonl")
    return scene.start("run", tasks, "--out", str(scene.out), "--json", "--retries", "0", *words)


@pytest.mark.parametrize("there", ["/opt/of-mine/tools", "/of-mine", "/tmp/of-mine"])
@pytest.mark.parametrize("program", ["my-agent", "{there}/bin/my-agent"])
def test_a_mount_brings_the_agent_into_process_sandboxes(scene: Scene, there: str, program: str) -> None:
    mount = f"{scene.place}/tools:{there}"

    command = run(scene, "--mount", mount, "--command", program.format(there=there))

    assert command.wait(120) == 0, command
    assert scene.outcomes() == {"one": "passed"}
    assert not Path(there).exists()


def test_a_mount_cannot_be_written(scene: Scene) -> None:
    line = "sh -c 'touch /opt/tools/new || echo agent > out.txt'"

    command = run(scene, "--mount", f"{scene.place}/tools:/opt/tools", "--command", line)

    assert command.wait(120) == 0, command
    assert scene.outcomes() == {"one": "passed"}
    assert [entry.name for entry in (scene.place / "tools").iterdir()] == ["bin"]


@pytest.mark.parametrize("line", ["{tools}/my-agent", "sh {tools}/my-agent", "my-agent"])
def test_a_program_is_shown_where_it_is(scene: Scene, line: str) -> None:
    tools = scene.place / "tools" / "bin"
    scene.env = {"PATH": f"{tools}:{os.environ['PATH']}"}

    command = run(scene, "--command", line.format(tools=tools))

    assert command.wait(120) == 0, command
    assert scene.outcomes() == {"one": "passed"}


def test_a_directory_that_no_sandbox_shows_is_one_error_at_the_start(scene: Scene) -> None:
    line = f"sh -c 'ls \"$0\" && echo agent > out.txt' {scene.place}/tools"

    refused = run(scene, "--command", line)

    assert refused.wait(60) == 2, refused
    hint = f"--mount {scene.place}/tools:{scene.place}/tools"
    assert f"hint: add `{hint}`" in " ".join(refused.stderr.split())
    assert not scene.out.exists()

    command = run(scene, *hint.split(), "--command", line)

    assert command.wait(120) == 0, command
    assert scene.outcomes() == {"one": "passed"}


def test_a_relative_program_is_the_sandboxs_and_the_error_says_so(scene: Scene) -> None:
    (Path.cwd() / "pyproject.toml").stat()  # a file of this directory

    command = run(scene, "--command", "./pyproject.toml")

    assert command.wait(120) == 4, command
    told = " ".join(command.stderr.split())
    assert f"use `{Path.cwd()}/pyproject.toml` for the local file" in told


@pytest.mark.parametrize("there", ["/tmp", "/", "/run/holdwater/work", "/proc/x"])
def test_a_mount_over_a_sandbox_s_own_directories_is_refused(scene: Scene, there: str) -> None:
    command = run(scene, "--mount", f"{scene.place}/tools:{there}", "--command", "true")

    assert command.wait(60) == 2, command
    assert f"reserved in a process sandbox: `{there}`" in " ".join(command.stderr.split())
    assert not scene.out.exists()
