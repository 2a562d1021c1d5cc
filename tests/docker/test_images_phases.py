"""Recipes of two phases: bases with `before` lines are published once, agents come on top in the registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.docker_daemon import MB, Daemon, Registry, noise
from tests.docker_images import DockerScene

# Each execution leaves another file, so a base whose lines were run again has another digest.
STEPS = 'before = ["RUN cat /proc/sys/kernel/random/uuid > /before"]\nnetwork = "none"\ncache = 0'
NOWHERE = "unix:///nonexistent/docker.sock"


@pytest.fixture
def scene(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerScene]:
    made = DockerScene(tmp_path, registry, monkeypatch)
    yield made
    made.scene.close()


class TwoPhases:
    """Two bases and a recipe over them, built once for all tests."""

    def __init__(self, scene: DockerScene, root: bytes) -> None:
        self.scene = scene
        bases = [scene.registry.put(f"phases/source-{n}", [root, noise(MB)]) for n in range(2)]
        target = f'bases = "{scene.registry.host}/phases/bases"'
        self.recipe = scene.recipe(bases, "phases/agent", STEPS, target)
        self.last = self.built("first")
        self.first_executions = self.executions()

    def change_agent(self, word: str) -> None:
        (self.scene.agent / "tool").write_text(f"#!/bin/sh\necho {word}\n")

    def change_steps(self, steps: str) -> Path:
        """A recipe with other lines."""
        path = self.recipe.with_name("other.toml")
        path.write_text(self.recipe.read_text().replace(STEPS, steps))
        return path

    def built(self, name: str, *words: str) -> dict[str, Any]:
        self.last = self.scene.built(name, self.recipe, *words)
        return self.last

    def executions(self) -> int:
        """How many `before` lines the last build executed."""
        logs = (path.read_text() for path in (self.scene.out / "logs").glob("*.build.log"))
        return sum(text.count("] RUN cat /proc") for text in logs)


def prepared(rows: dict[str, Any]) -> list[str]:
    return [row["made"]["prepared"] for row in rows.values()]


def references(rows: dict[str, Any]) -> list[str]:
    return [row["made"]["reference"] for row in rows.values()]


@pytest.fixture(scope="module")
def phases(
    tmp_path_factory: pytest.TempPathFactory, registry: Registry, root: bytes, daemon: Daemon
) -> Iterator[TwoPhases]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", daemon.host)
        made = DockerScene(tmp_path_factory.mktemp("phases"), registry, environment)
        yield TwoPhases(made, root)
        made.scene.close()


def test_a_new_agent_runs_no_before_line_again(
    phases: TwoPhases, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = phases.last
    assert phases.first_executions == 2
    phases.change_agent("changed")
    monkeypatch.setenv("DOCKER_HOST", NOWHERE)

    second = phases.built("second", "--engine", "registry")

    assert [row["outcome"] for row in second.values()] == ["made", "made"]
    assert prepared(second) == prepared(before)
    assert not set(references(second)) & set(references(before))
    assert phases.executions() == 0
    image = references(second)[0]
    assert daemon.docker("run", "--rm", "--network", "none", image).strip() == "changed"
    assert daemon.docker("run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/before")
    daemon.docker("rmi", image)


def test_with_docker_a_new_agent_runs_no_before_line_either(phases: TwoPhases, daemon: Daemon) -> None:
    images, before = daemon.images(), phases.last
    phases.change_agent("changed again")
    plan = phases.scene.scene.start("images", "plan", str(phases.recipe), "--json")
    assert plan.wait(60) == 0, plan
    assert (plan.document()["make"], plan.document()["make_bases"], plan.document()["disk"]) == (2, 0, 0)

    third = phases.built("third")

    assert (prepared(third), phases.executions()) == (prepared(before), 0)
    assert daemon.images() == images


def test_lines_that_need_the_agent_are_run_on_published_bases(phases: TwoPhases, daemon: Daemon) -> None:
    images, before = daemon.images(), phases.last
    phases.change_agent("both")
    recipe = phases.change_steps(f'{STEPS}\nafter = ["RUN cat /before /opt/agent/tool > /opt/both"]')

    rows = phases.scene.built("after", recipe)

    assert (prepared(rows), phases.executions()) == (prepared(before), 0)
    assert daemon.images() == images
    image = references(rows)[0]
    words = ("run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/opt/both")
    assert daemon.docker(*words).rstrip().endswith("echo both")
    daemon.docker("rmi", image)


def test_force_repeats_the_phase_that_it_names(phases: TwoPhases, daemon: Daemon) -> None:
    images, records = daemon.images(), set(daemon.records())
    phases.change_agent("forced")
    before = phases.built("before")
    assert {row["outcome"] for row in phases.built("present").values()} == {"present"}

    agent = phases.built("agent", "--force", "agent")
    assert {row["outcome"] for row in agent.values()} == {"made"}
    assert (prepared(agent), phases.executions()) == (prepared(before), 0)
    assert references(agent) == references(before), "the same content has the same tag"

    bases = phases.built("bases", "--force", "bases")
    assert phases.executions() == 2
    assert not set(prepared(bases)) & set(prepared(before))
    assert not set(references(bases)) & set(references(before)), "another base is another image"

    assert {row["outcome"] for row in phases.built("all", "--force").values()} == {"made"}
    assert phases.executions() == 2
    assert (daemon.images(), set(daemon.records())) == (images, records)


def test_without_docker_a_base_that_is_not_published_is_impossible(phases: TwoPhases) -> None:
    recipe = phases.change_steps(STEPS.replace("/before", "/other"))

    plan = phases.scene.scene.start("images", "plan", str(recipe), "--engine", "registry", "--json")
    rows = phases.scene.built("other", recipe, "--engine", "registry", status=1)

    assert plan.wait(60) == 1, plan
    assert (plan.document()["impossible"], plan.document()["unknown"]) == (2, 0)
    assert "with the recipe's steps is not published" in plan.document()["images"][0]["failure"]
    assert {row["outcome"] for row in rows.values()} == {"failed"}
    assert {row["attempts"] for row in rows.values()} == {1}


def test_kept_bases_are_not_pulled_by_the_next_build(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    images = daemon.images()
    bases = [scene.registry.put(f"kept/base-{n}", [root, noise((n + 2) * MB)]) for n in range(3)]
    recipe = scene.recipe(bases, "kept/agent", 'before = ["RUN true"]\nnetwork = "none"\nconcurrency = 1')

    scene.built("first", recipe, "--keep", "--cache", "200MiB")
    kept = daemon.images() - images
    again = scene.built("second", recipe, "--force", "--keep", "--cache", "200MiB")

    assert len(kept) == 3 and all("/kept/base-" in one for one in kept)
    assert [row["made"].get("downloaded", 0) for row in again.values()] == [0, 0, 0]
    assert daemon.images() - images == kept
    scene.built("third", recipe, "--force", "--cache", "0")
    assert daemon.images() == images
    clean = scene.scene.start("images", "clean", "--json")
    assert clean.wait(60) == 0, clean
    assert json.loads(clean.stdout) == []


def test_the_cache_bounds_the_bases_that_stay(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    images = daemon.images()
    layers = [[noise(MB), root, noise(20 * MB)] for _ in range(3)]  # they share none
    bases = [scene.registry.put(f"bounded/base-{n}", layers[n]) for n in range(3)]
    recipe = scene.recipe(bases, "bounded/agent", 'before = ["RUN true"]\nnetwork = "none"\nconcurrency = 1')
    one = 21 * MB + len(root)

    monkeypatch.setenv("HOLDWATER_CACHE_SIZE", str(one + one // 2))
    scene.built("first", recipe, "--keep")

    kept = daemon.images() - images
    assert len(kept) == 1 and "/bounded/base-2" in kept.pop(), "the one that was used last"
    scene.built("second", recipe, "--cache", "0", "--force")
    assert daemon.images() == images
