"""The docker engine against a real daemon and a real registry."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from tests import docker_daemon
from tests.docker_daemon import MB, WAY, Daemon, Notes, Registry, RegistryBases, Watched, layer, noise, tar

from holdwater.core.errors import ImageFailed
from holdwater.core.image import (
    BuildSteps,
    ConfigEdits,
    ImageBlueprint,
    ImageOutcome,
    ImageTarget,
    make_labels,
)
from holdwater.docker.client import DockerClient
from holdwater.image.docker.engine import DockerEngine
from holdwater.image.docker.janitor import Janitor

ODD = {
    "DOLLAR": "$HOME ${PATH} $$",
    "QUOTES": """it's "quoted" `so`""",
    "SLASHES": "C:\\dir\\ and \\n and \\$x \\",
    "LINES": "one\ntwo\r\n$three\n",
    "SPACES": "  around  ",
    "HASH": "# no comment",
    "UNICODE": "äöü 漢字 🚰",
    "EMPTY": "",
    "EQUAL": "a=b=c",
}


@asynccontextmanager
async def engine(
    daemon: Daemon, state: Path, blueprint: ImageBlueprint, notes: Notes, cache: int = 0
) -> AsyncIterator[DockerEngine]:
    async with (
        DockerClient(daemon.host) as client,
        Janitor(client, state, "run-1", cache, notes) as janitor,
        DockerEngine(blueprint, client, RegistryBases(), janitor, notes, WAY) as made,
    ):
        yield made


def entry(name: str, kind: bytes, mode: int = 0o755, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.mtime = kind, mode, 1_000_000_000
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def exported(daemon: Daemon, reference: str, into: Path) -> dict[str, tuple[object, ...]]:
    """The files of an image: type, mode, owner, link and content of each."""
    daemon.docker("pull", "--quiet", reference)
    container = daemon.docker("create", reference, "none").strip()
    try:
        daemon.docker("export", "--output", str(into), container)
    finally:
        daemon.docker("rm", container)
        daemon.docker("rmi", reference)
    found = {}
    with tarfile.open(into) as members:
        for one in members:
            content = members.extractfile(one).read() if one.isreg() else b""  # type: ignore[union-attr]
            found[one.name] = (one.type, oct(one.mode & 0o7777), one.uid, one.gid, one.linkname, content)
    return found


async def test_an_image_is_what_the_recipe_says(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    files = [
        entry("opt/agent", tarfile.DIRTYPE, 0o750, uid=7, gid=8),
        ("opt/agent/bin/agent", b"#!/bin/sh\necho hello\n"),
        entry("opt/agent/link", tarfile.SYMTYPE, linkname="/bin/cat"),
        entry("opt/agent/same", tarfile.LNKTYPE, linkname="opt/agent/bin/agent"),
        entry("opt/agent/setuid", tarfile.REGTYPE, 0o4755, uid=1000, gid=1000),
        entry("opt/agent/null", tarfile.CHRTYPE, 0o666, devmajor=1, devminor=3),
        ("opt/agent/ä 漢", b""),
    ]
    edits = ConfigEdits(
        env=ODD,
        user="agent",
        workdir="/tmp",
        entrypoint=("/bin/sh", "-c", 'echo "$0" $HOME'),
        cmd=("a b", "c\nd"),
        labels={"io.test/odd": ODD["LINES"], "plain": ODD["QUOTES"], "a=b": "$c"},
    )
    steps = BuildSteps(
        before=("RUN echo before > /before", 'RUN ["/bin/mkdir", "/made"]'),
        after=("RUN cat /opt/agent/bin/agent > /after && \\\n  echo done >> /after",),
    )
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar(files)),), edits=edits, steps=steps)
    base = registry.put("what/base", [root, noise(MB)], {"Env": ["PATH=/bin", "KEPT=1"], "Cmd": ["gone"]})
    image = ImageTarget(
        name="what", base=base, repository=f"{registry.host}/what/agent", aliases=("friendly",)
    )
    notes, watched = Notes(), Watched()

    async with engine(daemon, tmp_path / "state", blueprint, notes) as docker:
        foreseen = await docker.foresee(image)
        made = await docker.make(image, tmp_path / "log", watched)
        again = await docker.make(image, tmp_path / "log2", Watched())

    key = made.reference.rpartition(":")[2]
    assert (foreseen.how, made.how, again.how) == (ImageOutcome.MADE, ImageOutcome.MADE, ImageOutcome.PRESENT)
    assert (foreseen.reference, again.digest, made.aliases) == (made.reference, made.digest, ("friendly",))
    assert registry.tags("what/agent") == {key, "friendly"}
    assert watched.phases == ["base", "assembly", "push"]
    assert 2 * MB < watched.highest < foreseen.disk
    assert (made.downloaded, made.replaced) == (foreseen.download, "")
    assert made.uploaded > 0 and len(made.layers) >= 3

    config = registry.config("what/agent", key)["config"]
    assert dict(pair.split("=", 1) for pair in config["Env"]) == {"PATH": "/bin", "KEPT": "1", **ODD}
    assert config["Labels"] == make_labels(made.base_digest, blueprint)
    assert (config["User"], config["WorkingDir"]) == ("agent", "/tmp")
    assert (config["Entrypoint"], config["Cmd"]) == (list(edits.entrypoint or ()), list(edits.cmd or ()))

    found = exported(daemon, made.reference, tmp_path / "export.tar")
    assert found["opt/agent"][:4] == (tarfile.DIRTYPE, "0o750", 7, 8)
    assert found["opt/agent/link"][0::4] == (tarfile.SYMTYPE, "/bin/cat")
    assert found["opt/agent/setuid"][:4] == (tarfile.REGTYPE, "0o4755", 1000, 1000)
    assert found["opt/agent/null"][:2] == (tarfile.CHRTYPE, "0o666")
    links = {found[f"opt/agent/{name}"][0] for name in ("same", "bin/agent")}
    assert links == {tarfile.LNKTYPE, tarfile.REGTYPE}
    assert found["opt/agent/ä 漢"][5] == b""
    assert (found["before"][5], found["after"][5]) == (b"before\n", b"#!/bin/sh\necho hello\ndone\n")
    assert found["made"][0] == tarfile.DIRTYPE

    assert (notes, daemon.images(), daemon.records()) == ([], *before)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == [
        "_warm.jsonl",
        "builds.lock",
        "janitor.lock",
    ]
    assert "RUN echo before" in (tmp_path / "log").read_text()


async def test_something_else_under_the_tag_is_not_taken_for_done(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),))
    base = registry.put("else/base", [root])
    image = ImageTarget(name="else", base=base, repository=f"{registry.host}/else/agent")

    async with engine(daemon, tmp_path / "state", blueprint, Notes()) as docker:
        key = (await docker.foresee(image)).reference.rpartition(":")[2]
        registry.put("else/agent", [root], {"Labels": {"io.holdwater.key": "another"}}, tag=key)
        foreseen = await docker.foresee(image)
        made = await docker.make(image, tmp_path / "log", Watched())

    assert (foreseen.how, made.how) == (ImageOutcome.MADE, ImageOutcome.MADE)
    assert foreseen.replaces == made.replaced != ""
    assert registry.config("else/agent", key)["config"]["Labels"]["io.holdwater.key"] == key


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (
            BuildSteps(before=("RUN echo so it goes && cat /nowhere",)),
            "cat: /nowhere: No such file or directory",
        ),
        (BuildSteps(after=("RUNN what",)), "unknown instruction: RUNN"),
    ],
)
async def test_a_broken_step_is_reported_with_its_last_output_and_leaves_nothing(
    steps: BuildSteps, words: str, daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),), steps=steps)
    base = registry.put("broken/base", [root, noise(MB)])
    notes = Notes()

    async with engine(daemon, tmp_path / "state", blueprint, notes) as docker:
        with pytest.raises(ImageFailed) as raised:
            image = ImageTarget(name="broken", base=base, repository=f"{registry.host}/broken/agent")
            await docker.make(image, tmp_path / "log", Watched())

    assert (raised.value.kind, raised.value.again) == ("build", False)
    assert words in raised.value.message and "`broken`" in raised.value.message
    assert words in (tmp_path / "log").read_text()
    assert (notes, daemon.images(), daemon.records()) == ([], *before)


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "again", "after"),
    [
        (429, {"code": "TOOMANYREQUESTS", "message": "slow down; Retry-After: 7"}, {}, "rate", True, 7.0),
        (403, {"code": "DENIED", "message": "requested access is denied"}, {}, "denied", False, 0.0),
        (404, {"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}, {}, "missing", False, 0.0),
        (503, {"code": "UNAVAILABLE", "message": "later"}, {}, "registry", True, 0.0),
    ],
)
async def test_answers_of_a_registry_to_the_daemon_are_distinguished(
    status: int,
    body: dict[str, str],
    headers: dict[str, str],
    kind: str,
    again: bool,
    after: float,
    daemon: Daemon,
    registry: Registry,
    root: bytes,
    tmp_path: Path,
) -> None:
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),))
    reference = registry.put("told/base", [root])

    class Elsewhere(RegistryBases):
        async def find_base(self, asked: str, platform: object) -> object:  # type: ignore[override]
            return await super().find_base(reference, platform)  # type: ignore[arg-type]

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v2/":
            return web.Response()
        return web.json_response({"errors": [body]}, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with (
        _served(app) as host,
        DockerClient(daemon.host) as client,
        Janitor(client, tmp_path / "state", "told", 0, Notes()) as janitor,
        DockerEngine(blueprint, client, Elsewhere(), janitor, Notes(), WAY) as docker,
    ):
        image = ImageTarget(name="told", base=f"{host}/a/b:1", repository=f"{registry.host}/told/agent")
        with pytest.raises(ImageFailed) as raised:
            await docker.make(image, tmp_path / "log", Watched())

    assert (raised.value.kind, raised.value.again, raised.value.after) == (kind, again, after), raised.value


async def test_a_cancelled_build_leaves_nothing(
    daemon: Daemon, registry: Registry, root: bytes, tmp_path: Path
) -> None:
    before = daemon.images(), daemon.records()
    steps = BuildSteps(before=("RUN echo first > /first", "RUN echo begun && sleep 600"))
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),), steps=steps)
    base = registry.put("cancelled/base", [root, noise(MB)])
    image = ImageTarget(name="cancelled", base=base, repository=f"{registry.host}/cancelled/agent")
    notes, log = Notes(), tmp_path / "log"

    async with engine(daemon, tmp_path / "state", blueprint, notes) as docker:
        making = asyncio.ensure_future(docker.make(image, log, Watched()))
        while not (log.exists() and "begun\n" in log.read_text()):
            await asyncio.sleep(0.05)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert daemon.images() == before[0]

    assert (notes, daemon.images(), daemon.records()) == ([], *before)


async def test_a_daemon_that_is_gone_is_worth_another_try(
    registry: Registry, root: bytes, tmp_path: Path
) -> None:
    blueprint = ImageBlueprint(layers=(layer(tmp_path, tar([("opt/a", b"1")])),))
    base = registry.put("gone/base", [root])
    image = ImageTarget(name="gone", base=base, repository=f"{registry.host}/gone/agent")
    notes = Notes()

    with docker_daemon.daemon(tmp_path / "docker") as other:
        async with engine(other, tmp_path / "state", blueprint, notes) as docker:
            other.process.terminate()
            other.process.wait()
            with pytest.raises(ImageFailed) as raised:
                await docker.make(image, tmp_path / "log", Watched())

    assert (raised.value.kind, raised.value.again) == ("daemon", True)
    assert {kind for kind, _ in notes} == {"cleanup.failed"}


@asynccontextmanager
async def _served(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    finally:
        await runner.cleanup()
