"""Paths of a start that lead out of a sandbox: refused by their field, wherever they come from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.command_runner import Scene

from holdwater.core.errors import BadInput, RequestRefused, SandboxFailed
from holdwater.core.records import Instance, Limits, Network, SandboxSpec
from holdwater.core.serving_protocol import Order
from holdwater.sandbox.probe import probe
from holdwater.sandbox.process_sandboxes import ProcessSandboxes
from holdwater.serve.wire_format import check_order
from holdwater.suite.harbor.task_file import read_task
from holdwater.suite.swebench.rows import parse_options

BAD = {"up": "/../oldroot{place}", "inner": "/app/../../oldroot{place}", "relative": "app", "nul": "/a\0b"}
SUITE = """
import holdwater as hw


def instances():
    yield hw.Instance(id="one", start=hw.SandboxSpec(directories=("/logs", "/../oldroot" + MADE)))


async def grade(instance, sandbox, answer):
    return True


suite = hw.Suite(name="odd", instances=instances, grade=grade)
"""


@pytest.fixture(params=list(BAD))
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return BAD[request.param].format(place=tmp_path / "made")


@pytest.mark.parametrize("stage", ["start", "grader"])
@pytest.mark.parametrize("field", ["workdir", "directories"])
def test_an_order_is_refused_by_its_field(path: str, stage: str, field: str) -> None:
    start = SandboxSpec(workdir=path) if field == "workdir" else SandboxSpec(directories=("/logs", path))

    with pytest.raises(RequestRefused, match=rf"`instance\.{stage}\.{field}` (must|contains)"):
        check_order(Order(key="k", instance=Instance(id="one", **{stage: start})))


def test_a_harbor_task_is_refused_by_its_field(tmp_path: Path, path: str) -> None:
    (tmp_path / "task.toml").write_text(
        f'[environment]\nworkdir = "{path.encode("unicode_escape").decode()}"\n'.replace("\\x00", "\\u0000")
    )

    with pytest.raises(BadInput, match=r"task\.toml: field `environment\.workdir`: "):
        read_task(tmp_path, "task.toml")


def test_an_option_of_swebench_is_refused_by_its_name() -> None:
    with pytest.raises(BadInput, match=r"`workdir` must not contain `\.\.`: `/\.\./x`"):
        parse_options("swebench:rows.jsonl?workdir=/../x")


def test_a_suite_in_python_is_refused_and_nothing_is_made(scene: Scene) -> None:
    scene.suite(SUITE, MADE=str(scene.place / "made"))

    command = scene.run("--agent", "nop", "--workers", "1")

    assert command.wait() == 2, command
    assert "(`one`): field `start.directories` must not contain `..`" in " ".join(command.stderr.split())
    assert not (scene.place / "made").exists()


async def test_a_sandbox_that_begins_anew_refuses_them_too(tmp_path: Path, path: str) -> None:
    boxes = ProcessSandboxes(tmp_path / "scratch", f"run-{os.getpid()}", Network.GATEWAY)
    async with boxes.open(1, Limits(), None) as box:
        await box.renew(SandboxSpec(directories=(path,)))
        with pytest.raises(SandboxFailed, match="`directories` "):
            await box.run("true")

    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(
    not probe().works and os.environ.get("CI") != "true",
    reason=f"bubblewrap does not work here: {probe().why_not}",
)
@pytest.mark.parametrize("kept", ["/", "//", "/proc", "/proc/sys", "/dev", "/run/holdwater/private"])
async def test_a_process_sandbox_keeps_its_own_directories(tmp_path: Path, kept: str) -> None:
    boxes = ProcessSandboxes(tmp_path / "scratch", f"run-{os.getpid()}", Network.GATEWAY)
    async with boxes.open(1, Limits(), None, SandboxSpec(workdir=kept)) as box:
        with pytest.raises(SandboxFailed, match="is reserved"):
            await box.run("true")
