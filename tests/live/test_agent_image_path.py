"""The agent's files from a path of an image in a registry, such as the environment that a builder made."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.image_builds import ImageScene, real_registry


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ImageScene]:
    monkeypatch.setenv("HOLDWATER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with real_registry(tmp_path / "registry") as port:
        scene = ImageScene(tmp_path, port)
        yield scene
        scene.close()


def push_builder(images: ImageScene, program: str) -> None:
    """Push an image with an environment whose interpreter is a link to another directory of the agent."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in (
            ("agent-server/python/bin/python3", b"#!/bin/sh\n"),
            ("agent-server/app.py", program.encode()),
            ("home/notes.txt", b"of the builder"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("agent-server/.venv/bin/python")
        link.type, link.linkname = tarfile.SYMTYPE, "/agent-server/python/bin/python3"
        tar.addfile(link)
    content = plain.getvalue()
    layer = (gzip.compress(content, 1, mtime=0), f"sha256:{hashlib.sha256(content).hexdigest()}")
    images.pusher.push("builder", "latest", [layer], "builder")


def write_recipe(images: ImageScene, path: str) -> Path:
    recipe = images.recipe(images.bases(1), repository="taken")
    text = recipe.read_text()
    agent = f'image = "{images.host}/builder:latest:{path}"\nprefix = "/agent-server"\n'
    recipe.write_text(f"{text.partition('[agent]')[0]}[agent]\n{agent}")
    return recipe


def test_a_path_of_an_image_is_the_layer_and_follows_the_image(images: ImageScene) -> None:
    push_builder(images, "first")
    recipe = write_recipe(images, "/agent-server")

    made = [images.built(recipe, name)["made"] for name in ("first", "again")]
    push_builder(images, "second")
    made.append(images.built(recipe, "second")["made"])

    assert made == [1, 0, 1]
    rows = json.loads((images.place / "second" / "images.json").read_bytes())["images"]
    (digest,) = rows[0]["made"]["layers"]
    name = digest.removeprefix("sha256:")
    blobs = images.place / "registry/data/docker/registry/v2/blobs/sha256"
    with tarfile.open(blobs / name[:2] / name / "data") as tar:
        names = {member.name for member in tar if not member.isdir()}
        python = tar.getmember("agent-server/.venv/bin/python")
        program = tar.extractfile("agent-server/app.py")
        assert program is not None and program.read() == b"second"
    assert names == {f"agent-server/{part}" for part in ("app.py", "python/bin/python3", ".venv/bin/python")}
    assert python.linkname == "/agent-server/python/bin/python3"


def test_a_path_that_the_image_does_not_have_ends_the_plan(images: ImageScene) -> None:
    push_builder(images, "first")

    plan = images.images("plan", write_recipe(images, "/agent"))

    assert plan.wait(30) == 1, plan
    assert "/builder:latest" in plan.stderr and "there is no such path" in plan.stderr
