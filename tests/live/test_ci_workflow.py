"""The example workflow for GitHub Actions: its steps, as a runner executes them, against a real registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.command_runner import SOURCE, until
from tests.image_builds import ImageScene, real_registry, settled
from tests.wait_bounds import stretch

from holdwater.image.recipe import read_recipe
from holdwater.ledger.directory import RunDirectory

EXAMPLE = Path(__file__).parents[2] / "examples" / "ci"
INSTALLS = ("pip install ", "sudo apt-get ")  # the machine of a test has these programs
STEP_SECONDS = 60.0


class Runner:
    """Executes the `run` steps of the workflow in a checkout, as a runner does."""

    def __init__(self, place: Path, recipe: Path) -> None:
        self.place = place
        self.jobs: dict[str, Any] = yaml.safe_load((EXAMPLE / "images.yml").read_text())["jobs"]
        self.recipe = recipe
        programs = place / "programs"
        programs.mkdir()
        (programs / "holdwater").write_text(f'#!/bin/sh\nexec {sys.executable} -m holdwater "$@"\n')
        (programs / "holdwater").chmod(0o755)
        self.path = f"{programs}:{os.environ['PATH']}"

    def steps(self, job: str) -> list[str]:
        """The scripts of a job, without those that install programs."""
        scripts = [step["run"] for step in self.jobs[job]["steps"] if "run" in step]
        return [script for script in scripts if not script.startswith(INSTALLS)]

    def temp(self, shard: int) -> Path:
        return self.place / f"temp-{shard}"

    def start(self, script: str, shard: int = 0) -> subprocess.Popen[bytes]:
        temp = self.temp(shard)
        temp.mkdir(exist_ok=True)
        env = {
            **os.environ,
            "PATH": self.path,
            "PYTHONPATH": str(SOURCE),
            "RECIPE": self.recipe.name,
            "SHARDS": "2",
            "SHARD": str(shard),
            "RUNNER_TEMP": str(temp),
            "GITHUB_WORKSPACE": str(self.recipe.parent),
            "GITHUB_STEP_SUMMARY": str(temp / "summary"),
        }
        return subprocess.Popen(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.recipe.parent,
            env=env,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def run(self, job: str, shard: int = 0) -> int:
        """Run the steps up to the first that fails; return its status."""
        return next((status for script in self.steps(job) if (status := self.finish(script, shard))), 0)

    def finish(self, script: str, shard: int) -> int:
        return self.start(script, shard).wait(stretch(STEP_SECONDS * 10))

    def kill_build(self, shard: int) -> None:
        """End the build as the loss of its machine does."""
        holder = RunDirectory.open(self.temp(shard) / "build").find_holder()
        assert holder is not None
        os.kill(holder.pid, signal.SIGKILL)

    def restore_build(self, shard: int) -> None:
        """Replace the directory of the build by a copy, as the cache of a workflow does."""
        build, copy = self.temp(shard) / "build", self.temp(shard) / "copy"
        shutil.copytree(build, copy, symlinks=True, ignore=shutil.ignore_patterns("*.sock"))
        shutil.rmtree(build)
        copy.rename(build)

    def read(self, shard: int, name: str) -> Any:
        return json.loads((self.temp(shard) / name).read_bytes())


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageScene]:
    monkeypatch.setenv("HOLDWATER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with real_registry(tmp_path / "registry") as port:
        scene = ImageScene(tmp_path, port)
        yield scene
        scene.close()


@pytest.mark.parametrize("count", [15, pytest.param(433, marks=pytest.mark.proof)])
def test_shards_that_are_killed_and_run_again_make_every_image(images: ImageScene, count: int) -> None:
    # Few images are made slowly enough to be interrupted.
    rate = f'[registries."{images.host}"]\nrequests_a_minute = {160 * count}'
    recipe = images.recipe(images.bases(count), f"[build]\nconcurrency = 1\n{rate}")
    runner = Runner(images.place, recipe)
    assert runner.run("plan") == 0
    assert runner.read(0, "summary")["make"] == count
    (runner.temp(0) / "summary").unlink()
    doctor, build, audit = runner.steps("build")

    assert runner.finish(doctor, 1) == 0
    step = runner.start(build, 1)
    until("some are settled", lambda: settled(runner.temp(1) / "build") > 0, STEP_SECONDS)
    runner.kill_build(1)
    assert step.wait(stretch(STEP_SECONDS)) == 128 + signal.SIGKILL
    assert runner.finish(audit, 1) != 0, "the shard is not complete"
    runner.restore_build(1)
    assert [runner.finish(script, shard) for shard in (1, 2) for script in (build, audit)] == [0] * 4

    reports = [runner.read(shard, "report.json") for shard in (1, 2)]
    assert sum(report["made"] + report["present"] for report in reports) == count
    assert [runner.read(shard, "audit.json")["ok"] for shard in (1, 2)] == [True] * 2
    assert runner.run("plan") == 0
    assert runner.read(0, "summary")["make"] == 0, "a new run has nothing to build"


def test_a_missing_base_ends_the_workflow_before_it_builds(images: ImageScene) -> None:
    bases = images.bases(2)
    recipe = images.recipe([*bases, f"{images.host}/bases:none"])
    runner = Runner(images.place, recipe)

    assert runner.run("plan") == 1

    plan = runner.read(0, "plan.json")
    assert (plan["make"], plan["present"], plan["impossible"], plan["unknown"]) == (2, 0, 1, 0)
    assert not (runner.temp(0) / "summary").exists()
    _, build, _ = runner.steps("build")
    assert runner.finish(build, 1) == 1, "the other images are made all the same"
    images.pusher.push("bases", "none", [], "none")
    assert runner.finish(build, 1) == 0, "the same workflow run again"


def test_every_shard_of_the_matrix_is_built_and_its_build_is_kept() -> None:
    workflow = yaml.safe_load((EXAMPLE / "images.yml").read_text())
    build = workflow["jobs"]["build"]
    shards = int(workflow["env"]["SHARDS"])

    assert build["strategy"]["matrix"]["shard"] == list(range(1, shards + 1))
    restore, save = (
        next(step for step in build["steps"] if f"cache/{verb}" in step.get("uses", ""))
        for verb in ("restore", "save")
    )
    assert restore["with"]["path"] == save["with"]["path"] == "${{ runner.temp }}/build"
    assert save["with"]["key"].startswith(restore["with"]["restore-keys"]) and save["if"] == "always()"


def test_the_recipe_of_the_workflow_is_valid(tmp_path: Path) -> None:
    (tmp_path / "images.toml").write_text((EXAMPLE / "images.toml").read_text())
    (tmp_path / "bases.txt").write_text("one debian:12\ntwo debian:11\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "agent"\nversion = "1"\n')
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run([*git, *words], check=True)

    recipe = read_recipe(tmp_path / "images.toml", {"REGISTRY": "ghcr.io/o"})

    assert (recipe.repository, recipe.base_repository) == ("ghcr.io/o/agents", "ghcr.io/o/agent-bases")
    assert re.fullmatch(r"[0-9a-f]{40}", recipe.revision)
    assert recipe.aliases == ("{id}", f"{{id}}-{recipe.revision[:7]}")
