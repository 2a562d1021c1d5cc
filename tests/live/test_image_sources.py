"""The source of an agent in a recipe: a checkout that cannot be honoured is refused at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import SOURCE, Scene
from tests.wait_bounds import stretch

RECIPE = """
[bases]
images = ["127.0.0.1:9/base"]
[target]
repository = "127.0.0.1:9/agent"
[agent]
source = "project"
"""
PLAIN = "[project]\nname = 'agent'\nversion = '1'\n"
PACKAGE = PLAIN + "[build-system]\nrequires = ['setuptools']\n"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    (tmp_path / "images.toml").write_text(RECIPE)
    (tmp_path / "project").mkdir()
    yield scene
    scene.close()


def test_a_checkout_is_refused_before_a_run_directory_is_made(scene: Scene) -> None:
    project = scene.place / "project"
    (project / "pyproject.toml").write_text(PACKAGE)
    (project / "pdm.lock").touch()

    build = scene.start(
        "images", "build", str(scene.place / "images.toml"), "--out", str(scene.place / "run")
    )

    assert build.wait(60) == 2, build
    told = f"images.toml:7: `agent.source`: this lock cannot be honoured: `{project / 'pdm.lock'}`"
    assert told in build.stderr
    assert not (scene.place / "run").exists()


def test_a_uv_project_needs_uv(scene: Scene, tmp_path: Path) -> None:
    """Given a Python beside which there is no uv, and no uv on the path."""
    (tmp_path / "project" / "pyproject.toml").write_text(PACKAGE)
    (tmp_path / "project" / "uv.lock").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    libraries = next(path for path in sys.path if path.endswith("site-packages"))

    command = subprocess.run(
        [tmp_path / "bin" / "python", "-m", "holdwater", "images", "plan", tmp_path / "images.toml"],
        env={
            "PATH": str(tmp_path / "bin"),
            "PYTHONPATH": f"{SOURCE}{os.pathsep}{libraries}",
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=stretch(30),
        check=False,
    )

    assert command.returncode == 2, command.stderr
    assert (
        f"`agent.source`: `{tmp_path / 'project'}` is a uv project, and `uv` was not found" in command.stderr
    )
