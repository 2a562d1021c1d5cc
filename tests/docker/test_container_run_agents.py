"""Real agents mend a bug in a container, through the gateway; their work is graded, and read by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Scene
from tests.container_runs import CLIENTS, IMAGE, ROOT, Ground
from tests.export_readers import read_by_others
from tests.live.test_export_formats import READ_HARBOR, READ_OPENHANDS
from tests.scripted_fixer import MEND
from tests.swebench_rows import Benchmark

import holdwater as hw

AGENTS = {"claude-code": "claude", "mini-swe-agent": "mini"}
FORKED = "claude-code"  # the agent whose attempt is forked as well
KEY = "sk-upstream-0ddba11"
READ_SWEBENCH = """
import json, sys
from swebench.harness.utils import get_predictions_from_file
rows = get_predictions_from_file(sys.argv[1], "swe-bench", "test")
print(json.dumps(rows))
"""
READ_ATIF = """
import json, sys
from pathlib import Path
from harbor.models.trajectories.trajectory import Trajectory
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    trajectory = Trajectory.model_validate_json(path.read_text())
    print(json.dumps([trajectory.schema_version, len(trajectory.steps)]))
"""


def missing(agent: str) -> str:
    program = CLIENTS / "bin" / AGENTS[agent]
    if not program.exists():
        return f"`{AGENTS[agent]}` is not installed: `scripts/clients` does it"
    return "" if find_spec("swebench") else "`swebench` is not installed: `scripts/setup dev`"


@contextmanager
def model(ground: Ground, agent: str) -> Iterator[str]:
    """The scripted model, in the daemon's network and a process of its own; its URL."""
    words = [*ground.before, sys.executable, "-m", "tests.scripted_fixer", agent]
    env = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=env, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip()
        finally:
            process.kill()


def mounts() -> Iterator[str]:
    """The clients, where they were installed, and the Python that theirs are made of."""
    yield f"{CLIENTS}:{CLIENTS}"
    python = Path(os.path.realpath(CLIENTS / "mini" / "bin" / "python")).parents[1]
    if python != Path("/usr"):  # else the image has the same
        yield f"{python}:{python}"


@pytest.fixture
def scene(tmp_path: Path, ground: Ground) -> Iterator[Scene]:
    found = ground.scene(tmp_path)
    found.env = {**(found.env or {}), "OPENAI_API_KEY": KEY}
    yield found
    found.close()


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_mends_a_bug_and_others_read_what_it_did(
    scene: Scene, ground: Ground, tmp_path: Path, agent: str
) -> None:
    if reason := missing(agent):
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    benchmark = Benchmark(tmp_path / "benchmark", python="python3")
    benchmark.add("mended")
    words = ["--agent", agent, "--sandbox", "docker", "--sandbox-memory", "2GiB", "--retries", "0"]
    words += [word for mount in mounts() for word in ("--mount", mount)]
    with model(ground, agent) as url:
        words += ["--model", "scripted-model", "--base-url", url]
        spec = benchmark.spec(image=IMAGE)
        command = scene.start("run", spec, "--out", str(scene.out), "--json", *words)
        assert command.wait(110) == 0, (command, logs(scene))
        assert scene.outcomes() == {"mended": "passed"}, logs(scene)
        if agent == FORKED:
            check_fork(scene, tmp_path / "fork")

    patch = (scene.out / "artifacts" / "000001.patch").read_text()
    assert "+    return n / 2" in patch
    assert KEY not in patch and KEY not in logs(scene)
    ground.assert_clean()
    read_back(scene.out, tmp_path, patch)


def test_an_agent_that_the_plan_puts_into_the_image_is_found_there(
    scene: Scene, ground: Ground, tmp_path: Path
) -> None:
    benchmark = Benchmark(tmp_path / "benchmark", python="python3")
    benchmark.add("mended")
    tool = tmp_path / "tool" / "bin" / "mend"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"#!/bin/sh\n{MEND}\n")
    tool.chmod(0o755)
    images = ground.images()
    with ground.registry() as registry:
        recipe = tmp_path / "images.toml"
        recipe.write_text(
            f'[bases]\nimages = ["{registry}/{IMAGE}"]\n[target]\nrepository = "{registry}/agents"\n'
            '[agent]\ndirectory = "tool"\nprefix = "/opt/tool"\n'
            'env = {PATH = "/opt/tool/bin:/usr/bin:/bin"}\n'
        )
        words = ["--command", "mend", "--sandbox", "docker", "--images", str(recipe), "--retries", "0"]
        spec = benchmark.spec(image=f"{registry}/{IMAGE}")
        command = scene.start("run", spec, "--out", str(scene.out), "--json", *words)
        assert command.wait(100) == 0, (command, logs(scene))

    assert scene.outcomes() == {"mended": "passed"}, logs(scene)
    ground.assert_clean()
    assert images <= ground.images()


def check_fork(scene: Scene, out: Path) -> None:
    """A fork of the attempt repeats its first turn in a new container, and goes on from there."""
    [first, *rest] = [turn.number for turn in hw.transcript(scene.out, "mended") if turn.thread == 0]
    command = scene.start("fork", str(scene.out), "mended", "--turn", str(first), "--out", str(out), "--json")
    assert command.wait(110) == 0, command
    summary = command.document()
    assert summary["outcomes"] == {"passed": 1} and summary["saved"]["requests"] >= 1
    [now, *later] = [turn for turn in hw.transcript(out, "mended") if turn.thread == 0]
    assert now.recorded and len(later) == len(rest) and not any(turn.recorded for turn in later)


def read_back(run: Path, place: Path, patch: str) -> None:
    """What is exported of the run, by those whose formats these are."""
    export(run, place / "openhands", "openhands")
    told = json.loads(read_by_others(READ_OPENHANDS, place / "openhands"))
    assert len(told["mended"]) >= 3
    row = json.loads((place / "openhands" / "output.jsonl").read_text())
    assert row["test_result"]["git_patch"] == patch
    export(run, place / "harbor", "harbor")
    (trial,) = json.loads(read_by_others(READ_HARBOR, place / "harbor"))["trials"].values()
    assert trial["rewards"]["reward"] == 1.0
    export(run, place / "atif", "atif")
    schema, steps = json.loads(read_by_others(READ_ATIF, place / "atif").splitlines()[0])
    assert schema == "ATIF-v1.8" and steps >= 3
    export(run, place / "swebench", "swebench")
    (predictions,) = (place / "swebench").glob("*.jsonl")
    read = subprocess.check_output([sys.executable, "-c", READ_SWEBENCH, predictions], text=True)
    assert [one["model_patch"] for one in json.loads(read)] == [patch]
    report = json.loads(next((place / "swebench").glob("*report*.json")).read_text())
    assert (report["resolved_ids"], report["schema_version"]) == (["mended"], 2)


def export(run: Path, out: Path, form: str) -> None:
    import holdwater as hw

    hw.export(run, out, format=form)


def logs(scene: Scene) -> str:
    return "\n".join(path.read_text(errors="replace") for path in (scene.out / "logs").glob("0*"))[-6000:]
