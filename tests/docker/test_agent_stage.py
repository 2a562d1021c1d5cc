"""The agent's files from a stage of a Dockerfile: built once on a daemon, then the layer of all images."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Scene
from tests.docker_daemon import Daemon, Registry

DOCKERFILE = """
ARG TOOLS=none
FROM scratch AS base
ADD root.tar /

FROM base AS builder
ARG MODE=slow
RUN mkdir /made && echo "built $MODE" > /made/tool && ln -s tool /made/link && echo other > /other

FROM base AS broken
RUN false
"""


@pytest.fixture
def scene(tmp_path: Path, daemon: Daemon, root: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    monkeypatch.setenv("HOLDWATER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    (tmp_path / "sdk" / "docker").mkdir(parents=True)
    (tmp_path / "sdk" / "root.tar").write_bytes(root)
    (tmp_path / "sdk" / "docker" / "Dockerfile").write_text(DOCKERFILE)
    made = Scene(tmp_path)
    yield made
    made.close()


def write_recipe(scene: Scene, base: str, repository: str, agent: str) -> Path:
    path = scene.place / "images.toml"
    path.write_text(
        f'[bases]\nimages = ["{base}"]\n[target]\nrepository = "{repository}"\n[agent]\n'
        f'dockerfile = "sdk/docker/Dockerfile"\ncontext = "sdk"\n{agent}\n'
        '[build]\nnetwork = "none"\ncache = 0\n'
    )
    return path


def test_the_agent_is_a_path_of_a_stage(
    scene: Scene, daemon: Daemon, registry: Registry, root: bytes
) -> None:
    images, records = daemon.images(), set(daemon.records())
    base = registry.put("stage/base", [root])
    agent = 'target = "builder"\nargs = {MODE = "fast"}\npath = "/made"\nprefix = "/opt/made"'
    recipe = write_recipe(scene, base, f"{registry.host}/stage/agent", agent)

    build = scene.start("images", "build", str(recipe), "--out", str(scene.place / "run"), "--json")

    assert build.wait(120) == 0, build
    assert build.document()["made"] == 1
    (key,) = registry.tags("stage/agent")
    layer = registry.manifest("stage/agent", key)["layers"][-1]["digest"]
    with tarfile.open(fileobj=io.BytesIO(registry.ask("GET", f"/v2/stage/agent/blobs/{layer}"))) as tar:
        assert sorted(tar.getnames()) == ["opt/made", "opt/made/link", "opt/made/tool"]
        tool = tar.extractfile("opt/made/tool")
        assert tool is not None and tool.read() == b"built fast\n"
    again = scene.start("images", "plan", str(recipe), "--json")
    assert again.wait(120) == 0, again
    assert again.document()["present"] == 1, "the same files are the same layer"
    assert daemon.images() == images
    left = {name: record for name, record in daemon.records().items() if name not in records}
    assert left == {}


def test_a_file_of_the_last_stage_is_enough(scene: Scene, registry: Registry, root: bytes) -> None:
    base = registry.put("stage/base", [root])
    dockerfile = scene.place / "sdk" / "docker" / "Dockerfile"
    dockerfile.write_text(DOCKERFILE.partition("FROM base AS broken")[0].replace(" AS builder", ""))
    recipe = write_recipe(scene, base, f"{registry.host}/stage/file", 'path = "/other"')

    build = scene.start("images", "build", str(recipe), "--out", str(scene.place / "run"), "--json")

    assert build.wait(120) == 0, build
    (key,) = registry.tags("stage/file")
    layer = registry.manifest("stage/file", key)["layers"][-1]["digest"]
    with tarfile.open(fileobj=io.BytesIO(registry.ask("GET", f"/v2/stage/file/blobs/{layer}"))) as tar:
        assert sorted(tar.getnames()) == ["opt/agent", "opt/agent/other"]


def test_a_stage_that_cannot_be_built_fails_the_build_with_its_output(
    scene: Scene, daemon: Daemon, registry: Registry, root: bytes
) -> None:
    records = set(daemon.records())
    base = registry.put("stage/base", [root])
    agent = 'target = "broken"\npath = "/made"'
    recipe = write_recipe(scene, base, f"{registry.host}/stage/broken", agent)

    plan = scene.start("images", "plan", str(recipe))

    assert plan.wait(120) == 1, plan
    assert "the agent's stage of `" in plan.stderr and "RUN false" in plan.stderr
    assert set(daemon.records()) == records


@pytest.mark.parametrize(
    ("agent", "problem"),
    [
        (
            'target = "bilder"\npath = "/made"',
            "images.toml:8: `agent.target`: `HERE/sdk/docker/Dockerfile`: no such stage: `bilder`; "
            "the stages are `base`, `builder`, `broken`",
        ),
        (
            'target = "builder"\nargs = {MDOE = "fast"}\npath = "/made"',
            "images.toml:9: `agent.args`: `HERE/sdk/docker/Dockerfile`: no `ARG` declares this argument: "
            "`MDOE`",
        ),
        ('target = "builder"', "images.toml:6: `agent.dockerfile`: needs `path`, the place of the agent"),
    ],
)
def test_a_wrong_stage_is_named_before_anything_is_built(
    scene: Scene, daemon: Daemon, agent: str, problem: str
) -> None:
    records = set(daemon.records())
    recipe = write_recipe(scene, "127.0.0.1:9/base", "127.0.0.1:9/agent", agent)

    build = scene.start("images", "build", str(recipe), "--out", str(scene.place / "run"))

    assert build.wait(60) == 2, build
    assert problem.replace("HERE", str(scene.place)) in build.stderr
    assert not (scene.place / "run").exists()
    assert set(daemon.records()) == records
