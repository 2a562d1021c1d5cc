"""Images of remote containers: the server builds and pulls them, and the run needs no docker daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.command_runner import Command, Scene
from tests.container_runs import IMAGE, Ground
from tests.sandbox_server import ServedSandboxes, sandbox_server

SUITE = """
import holdwater as hw

def instances():
    for name, start in STARTS.items():
        yield hw.Instance(id=name, start=hw.SandboxSpec(**start))

async def solve(instance, sandbox, model):
    return (await sandbox.run("cat /note")).stdout.strip()

async def grade(instance, sandbox, answer):
    return answer == EXPECTED

suite = hw.Suite(name="images", instances=instances, grade=grade)
"""
DOCKERFILE = f"""FROM {IMAGE} AS first
ARG NAME=nothing
COPY $NAME /note
FROM first
COPY other /note
"""


@pytest.fixture
def server(tmp_path: Path, ground: Ground) -> Iterator[ServedSandboxes]:
    env = {"DOCKER_HOST": ground.host, "HOLDWATER_CACHE": str(tmp_path / "cache")}
    words = ("--sandbox", "docker", "--builds", "--client-grace", "2")
    with sandbox_server(tmp_path / "there", *words, before=ground.before, env=env) as served:
        yield served
        served.command.signal(15)
        assert served.command.wait() == 0, served.command
        assert list((served.directory / "scratch").iterdir()) == []
    ground.assert_clean()


@pytest.fixture
def scene(tmp_path: Path, ground: Ground) -> Iterator[Scene]:
    """Commands that are in the network of the registry, and have no docker daemon."""
    (tmp_path / "run").mkdir()
    env = {"DOCKER_HOST": f"unix://{tmp_path}/none", "HOLDWATER_CACHE": str(tmp_path / "run" / "cache")}
    scene = Scene(tmp_path / "run", ground.before, env)
    yield scene
    scene.close()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    directory = tmp_path / "context"
    directory.mkdir()
    (directory / "Dockerfile").write_text(DOCKERFILE)
    (directory / "note").write_text("a note of the context\n")
    (directory / "other").write_text("another\n")
    return directory


def run(scene: Scene, server: ServedSandboxes, starts: object, *words: str) -> Command:
    scene.suite(SUITE, STARTS=starts, EXPECTED="a note of the context")
    command = scene.run(*scene.agent(), "--workers", "1", "--retries", "0", *server.options(), *words)
    command.wait(120)
    return command


def test_a_context_is_sent_once_and_built_on_the_server(
    scene: Scene, server: ServedSandboxes, context: Path
) -> None:
    start = {"build": str(context), "build_target": "first", "build_args": {"NAME": "note"}}

    command = run(scene, server, {"one": start, "two": start}, "--samples", "2")

    assert command.document()["outcomes"] == {"passed": 4}, (command, server.command)
    assert command.document()["events"]["context.sent"] == 1
    (log,) = (scene.out / "logs").glob("image-*.build.log")
    assert "COPY" in log.read_text()


def test_a_failed_build_says_why_and_leaves_its_output(
    scene: Scene, server: ServedSandboxes, context: Path
) -> None:
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY missing /note\n")

    command = run(scene, server, {"one": {"build": str(context)}})

    assert command.document()["outcomes"] == {"image": 1}, command
    [row] = scene.export("attempts")
    assert "its image cannot be built" in row["failure"] and "missing" in json.dumps(row)
    (log,) = (scene.out / "logs").glob("image-*.build.log")
    assert "missing" in log.read_text() and log.name in json.dumps(row)


def test_a_context_with_a_link_to_outside_is_refused(
    scene: Scene, server: ServedSandboxes, context: Path
) -> None:
    (context / "other").unlink()
    (context / "other").symlink_to("/etc/shadow")

    command = run(scene, server, {"one": {"build": str(context)}})

    assert command.document()["outcomes"] == {"image": 1}, command
    assert "a link that leads out" in scene.export("attempts")[0]["failure"]


def test_images_of_a_recipe_are_made_in_the_registry_and_pulled(
    scene: Scene, server: ServedSandboxes, ground: Ground, tmp_path: Path
) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "note").write_text("a note of the context\n")
    with ground.registry() as registry:
        recipe = tmp_path / "images.toml"
        recipe.write_text(
            f'[bases]\nimages = ["{registry}/{IMAGE}"]\n[target]\nrepository = "{registry}/agents"\n'
            '[agent]\ndirectory = "tool"\nprefix = "/opt/tool"\n'
        )
        scene.file.parent.mkdir(exist_ok=True)
        starts = {"one": {"image": f"{registry}/{IMAGE}"}, "two": {"image": f"{registry}/{IMAGE}"}}
        global_suite = SUITE.replace("cat /note", "cat /opt/tool/note")
        scene.suite(global_suite, STARTS=starts, EXPECTED="a note of the context")
        words = (*scene.agent(), "--workers", "1", "--retries", "0", "--images", str(recipe))
        command = scene.run(*words, *server.options())
        command.wait(120)

    assert command.document()["outcomes"] == {"passed": 2}, (command, server.command)
