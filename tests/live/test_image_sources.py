"""The source of an agent in a recipe: one whose versions would not be those of its checkout is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene

RECIPE = """
[bases]
images = ["127.0.0.1:9/base"]
[target]
repository = "127.0.0.1:9/agent"
[agent]
source = "project"
"""
PLAIN = "[project]\nname = 'agent'\nversion = '1'\n"
ROOT = PLAIN + "[tool.uv.workspace]\nmembers = ['packages/*']\n"
MEMBER = PLAIN + "[tool.uv.sources]\ntools = {workspace = true}\n"


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.mark.parametrize(
    ("pyproject", "lock", "told"),
    [
        (PLAIN, "uv.lock", "lock files are not supported yet"),
        (PLAIN, "poetry.lock", "lock files are not supported yet"),
        (ROOT, None, "workspaces are not supported yet"),
        (MEMBER, None, "workspaces are not supported yet"),
    ],
)
def test_a_source_with_a_lock_or_a_workspace_is_refused(
    scene: Scene, pyproject: str, lock: str | None, told: str
) -> None:
    project, recipe = scene.place / "project", scene.place / "images.toml"
    project.mkdir()
    (project / "pyproject.toml").write_text(pyproject)
    if lock is not None:
        (project / lock).touch()
    recipe.write_text(RECIPE)

    plan = scene.start("images", "plan", str(recipe))

    assert plan.wait(60) == 2, plan
    assert f"images.toml:7: `agent.source`: {told}: `{project}" in plan.stderr
