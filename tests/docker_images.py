"""Builds of images with a docker daemon as scenes: bases in a registry, a recipe, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command_runner import Command, Scene
from tests.docker_daemon import MB, Registry, noise

STEPS = 'before = ["RUN echo before > /before"]\nafter = ["RUN cat /before > /opt/after"]\nnetwork = "none"'

BEFORE = 'before = ["RUN echo before > /before"]\nnetwork = "none"'


class DockerScene:
    """Recipes over bases in a registry, and the command with a daemon."""

    def __init__(self, place: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = place
        self.registry = registry
        self.scene = Scene(place)
        self.out = place / "run"
        self.temp = place / "temp"
        self.temp.mkdir()
        self.agent = place / "agent"
        self.agent.mkdir()
        (self.agent / "tool").write_text("#!/bin/sh\necho hello\n")
        (self.agent / "tool").chmod(0o755)
        (self.agent / "data").write_bytes(noise(MB))
        monkeypatch.setenv("HOLDWATER_CACHE", str(place / "cache"))
        monkeypatch.setenv("DOCKER_CONFIG", str(place / "docker-config"))
        monkeypatch.setenv("TMPDIR", str(self.temp))

    def recipe(self, bases: list[str], repository: str, build: str, target: str = "") -> Path:
        lines = [f"base-{number} {base}\n" for number, base in enumerate(bases)]
        (self.place / "bases.txt").write_text("".join(lines))
        path = self.place / f"{repository.replace('/', '-')}.toml"
        path.write_text(
            f'[bases]\nfile = "bases.txt"\n[target]\nrepository = "{self.registry.host}/{repository}"\n'
            f'alias = "{{id}}"\n{target}\n'
            '[agent]\ndirectory = "agent"\nenv = {MODE = "a \\"b\\" $c"}\nuser = "1000"\n'
            'workdir = "/opt"\nentrypoint = ["/opt/agent/tool"]\nlabels = {team = "evals"}\n'
            f"[build]\n{build}\n"
        )
        return path

    def build(self, recipe: Path, *words: str) -> Command:
        return self.scene.start("images", "build", str(recipe), "--out", str(self.out), "--json", *words)

    def built(self, name: str, recipe: Path, *words: str, status: int = 0) -> dict[str, Any]:
        """The rows of `images.json` of a build that ended with this status, by image."""
        self.out = self.place / f"built-{name}"
        command = self.build(recipe, *words)
        assert command.wait(120) == status, command
        return {row["name"]: row for row in manifest(self)["images"]}


def manifest(scene: DockerScene) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((scene.out / "images.json").read_bytes())
    return found
