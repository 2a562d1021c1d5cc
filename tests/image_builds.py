"""Builds of images as scenes: a real registry, bases pushed without docker, and the command on a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.daemons import Missing, Pusher, layer, registry
from tests.command_runner import Command, Scene

from holdwater.core.errors import HoldwaterError
from holdwater.ledger.reader import LedgerReader

KB = 1000


@contextmanager
def real_registry(place: Path) -> Iterator[int]:
    """Its port; a visible skip where there is none to be started, except in CI."""
    try:
        with registry(place) as port:
            yield port
    except Missing as error:
        assert os.environ.get("CI") != "true", error
        pytest.skip(str(error))


class ImageScene:
    """A registry with bases, an agent's directory, and recipes over them."""

    def __init__(self, place: Path, port: int) -> None:
        self.place = place
        self.port = port
        self.host = f"127.0.0.1:{port}"
        self.scene = Scene(place)
        self.pusher = Pusher(port)
        self.agent = place / "agent"
        self.agent.mkdir()
        (self.agent / "tool").write_text("#!/bin/sh\necho hello\n")
        (self.agent / "tool").chmod(0o755)

    def bases(self, count: int, size: int = KB, repository: str = "bases") -> list[str]:
        """Their references; all share one layer and have one of their own."""
        shared = layer(size, "shared")
        names = [f"b{number}" for number in range(count)]
        for name in names:
            self.pusher.push(repository, name, [shared, layer(size, f"{repository}-{name}")], name)
        return [f"{self.host}/{repository}:{name}" for name in names]

    def recipe(self, bases: list[str], more: str = "", repository: str = "agents") -> Path:
        path = self.place / "images.toml"
        (self.place / "bases.txt").write_text("".join(f"{one.rpartition(':')[2]} {one}\n" for one in bases))
        target = f"{self.host}/{repository}"
        agent = 'directory = "agent"\nenv = {MODE = "eval"}\nentrypoint = ["/opt/agent/tool"]'
        path.write_text(
            f'[bases]\nfile = "bases.txt"\n[target]\nrepository = "{target}"\nalias = "{{id}}"\n'
            f"[agent]\n{agent}\n{more}\n"
        )
        return path

    def images(self, verb: str, *words: str | Path) -> Command:
        return self.scene.start("images", verb, *map(str, words))

    def build(self, recipe: Path, name: str = "run", *words: str) -> Command:
        return self.images("build", recipe, "--out", self.place / name, "--json", *words)

    def built(self, recipe: Path, name: str = "run", *words: str, status: int = 0) -> dict[str, Any]:
        """The report of a build that ended with this status."""
        command = self.build(recipe, name, *words)
        assert command.wait(60) == status, command
        report: dict[str, Any] = command.document()
        return report

    def close(self) -> None:
        self.scene.close()
        self.pusher.close()


def settled(run: Path) -> int:
    """Images of a build that have their outcome by now."""
    try:
        with LedgerReader(run) as reader:
            return reader.summary().settled
    except HoldwaterError:
        return 0  # it is being made
