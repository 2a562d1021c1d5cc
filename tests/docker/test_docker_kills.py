"""kill -9 in the middle of a build and of a push: what was left is found, and a resume completes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psutil
from aiohttp import web
from tests.docker_daemon import MB, WAY, Daemon, Notes, Registry, RegistryBases, Watched, layer, noise, tar

from holdwater.core.image import BuildSteps, ImageBlueprint, ImageOutcome, ImageTarget
from holdwater.docker.client import DockerClient
from holdwater.image.docker.engine import DockerEngine
from holdwater.image.docker.janitor import Janitor

CHILD = """
import asyncio, sys, msgspec
from pathlib import Path
from tests.docker_daemon import WAY, Notes, RegistryBases, Watched
from holdwater.core.image import ImageBlueprint, ImageTarget
from holdwater.docker.client import DockerClient
from holdwater.image.docker.engine import DockerEngine
from holdwater.image.docker.janitor import Janitor

host, state, log, blueprint, image = sys.argv[1:]
blueprint = msgspec.json.decode(blueprint, type=ImageBlueprint)
image = msgspec.json.decode(image, type=ImageTarget)

class Bases(RegistryBases):
    async def find_tag(self, reference):
        return None

async def main():
    async with (
        DockerClient(host) as client,
        Janitor(client, Path(state), "killed", 0, Notes()) as janitor,
        DockerEngine(blueprint, client, Bases(), janitor, Notes(), WAY) as engine,
    ):
        await engine.make(image, Path(log), Watched())

asyncio.run(main())
"""


@asynccontextmanager
async def child(
    daemon: Daemon, place: Path, blueprint: ImageBlueprint, image: ImageTarget
) -> AsyncIterator[None]:
    """A process that makes the image; killed at the end of the block."""
    (place / "tmp").mkdir()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHILD, daemon.host, place / "state", place / "log"),
        *(msgspec.json.encode(one).decode() for one in (blueprint, image)),
        env={**os.environ, "TMPDIR": str(place / "tmp")},
    )
    try:
        yield
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def swept(daemon: Daemon, place: Path, before: tuple[object, ...]) -> None:
    """What the killed process left is there, and then it is not."""
    assert daemon.images() != before[0]
    journals = [path.name for path in (place / "state").glob("killed*")]
    assert sorted(journals) == ["killed.jsonl", "killed.work"]
    notes = Notes()
    async with DockerClient(daemon.host) as client, Janitor(client, place / "state", "next", 0, notes):
        pass
    assert (notes, daemon.images(), daemon.records()) == ([], *before)
    assert sorted(path.name for path in (place / "state").iterdir()) == [
        "_warm.jsonl",
        "builds.lock",
        "janitor.lock",
    ]
    assert list((place / "tmp").iterdir()) == []
    commands = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert not [one for one in commands if daemon.host in one and "build" in one]


async def test_a_build_that_was_killed_leaves_nothing_and_resumes(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    go = tmp_path / "log"
    steps = BuildSteps(before=("RUN echo first > /first", "RUN echo begun; sleep 600"))
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),), steps=steps)
    base = registry.put("killed/base", [root, noise(MB)])
    image = ImageTarget(name="killed", base=base, repository=f"{registry.host}/killed/agent")

    async with child(daemon, tmp_path, blueprint, image):
        while not (go.exists() and "begun\n" in go.read_text()):
            await asyncio.sleep(0.05)

    await swept(daemon, tmp_path, before)
    blueprint = msgspec.structs.replace(blueprint, steps=BuildSteps(before=steps.before[:1]))
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, tmp_path / "state", "killed", 0, Notes()) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, Notes(), WAY) as engine,
    ):
        assert (await engine.make(image, tmp_path / "log2", Watched())).how == ImageOutcome.MADE


async def test_a_push_that_was_killed_leaves_nothing(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),))
    base = registry.put("killed/push", [root, noise(MB)])
    pushing, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.method == "HEAD":
            return web.Response(status=404)
        if request.method == "POST":
            pushing.set()
            await over.wait()
        return web.Response(text=json.dumps({}))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        image = ImageTarget(name="killed", base=base, repository=f"127.0.0.1:{port}/killed/agent")
        async with child(daemon, tmp_path, blueprint, image):
            await pushing.wait()
        await swept(daemon, tmp_path, before)
    finally:
        over.set()
        await runner.cleanup()
