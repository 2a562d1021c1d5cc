"""The command on recipes that need a real build: leases of disk, kill -9, both engines, exit status 4."""

from __future__ import annotations

import io
import json
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests import docker_daemon, layer_projects
from tests.command_runner import until
from tests.docker.test_docker_budget import Others
from tests.docker_daemon import MB, Daemon, Registry, noise
from tests.docker_images import BEFORE, STEPS, DockerScene, manifest
from tests.image_builds import settled

from holdwater.image.docker.failure_causes import is_cache_damaged


@pytest.fixture
def scene(tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerScene]:
    made = DockerScene(tmp_path, registry, monkeypatch)
    yield made
    made.scene.close()


class ColdBuild(NamedTuple):
    """A build on a fresh daemon, without any cache: bases of `count` times `each` bytes, a disk of `size`."""

    size: int
    count: int
    each: int
    phased: bool = False  # the bases are published, and the agent is assembled in the registry


def hold_to_the_budget(
    scene: DockerScene, root: bytes, monkeypatch: pytest.MonkeyPatch, cold: ColdBuild
) -> None:
    size, count, each, phased = cold
    name = f"governed-{count}{'-phased' * phased}"
    assert count * each > size / 2, "more than a build may hold at once"
    target, steps = (f'bases = "{scene.registry.host}/{name}/bases"', BEFORE) if phased else ("", STEPS)
    bases = [scene.registry.put(f"{name}/base-{n}", [root, noise(each)]) for n in range(count)]
    with docker_daemon.daemon(scene.place / "docker", size) as daemon:
        monkeypatch.setenv("DOCKER_HOST", daemon.host)
        others = Others(daemon, bases[0])
        budget = daemon.free() - 8 * MB
        build = f'{steps}\nconcurrency = 4\ndisk = {budget}\ncache = "{2 * each // MB}m"'
        recipe = scene.recipe(bases, f"{name}/agent", build, target)

        command = scene.build(recipe)

        assert command.wait(1500) == 0, command
        report = command.document()
        assert (report["made"], report["failed"]) == (count, 0)
        assert sum(row["attempts"] for row in manifest(scene)["images"]) == count, "none was tried twice"
        assert each < report["peak_disk"] <= budget
        assert report["events"].get("cleanup.failed", 0) == 0
        assert others.untouched()
        left = [one for one in daemon.images() if not one.startswith("others/")]
        assert len(left) <= 2 and all("/base-" in one for one in left), left
        assert not list(scene.temp.iterdir())
    if phased:
        add_another_agent(scene, recipe, monkeypatch)


def add_another_agent(scene: DockerScene, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon is gone, and its disk with it: a new agent needs neither."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    prepared = [row["made"]["prepared"] for row in manifest(scene)["images"]]
    (scene.agent / "tool").write_text("#!/bin/sh\necho changed\n")

    rows = scene.built("another-agent", recipe, "--engine", "registry")

    assert [row["made"]["prepared"] for row in rows.values()] == prepared
    assert {row["outcome"] for row in rows.values()} == {"made"}
    assert sum(row["made"].get("downloaded", 0) for row in rows.values()) == 0


@pytest.mark.proof  # the same without the command: `test_docker_budget.py`
def test_a_disk_budget_holds_more_images_than_fit_on_it(
    scene: DockerScene, root: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_to_the_budget(scene, root, monkeypatch, ColdBuild(170 * MB, count=8, each=12 * MB))


@pytest.mark.proof
def test_40_bases_of_150_mb_are_built_in_2_gb(
    scene: DockerScene, root: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_to_the_budget(scene, root, monkeypatch, ColdBuild(2000 * MB, count=40, each=150 * MB))


@pytest.mark.parametrize(
    "cold",
    [
        ColdBuild(130 * MB, count=6, each=12 * MB, phased=True),
        pytest.param(ColdBuild(2000 * MB, count=40, each=150 * MB, phased=True), marks=pytest.mark.proof),
    ],
    ids=["72-mb", "6-gb"],
)
def test_bases_of_several_gb_are_prepared_cold_on_a_small_disk(
    scene: DockerScene, root: bytes, monkeypatch: pytest.MonkeyPatch, cold: ColdBuild
) -> None:
    hold_to_the_budget(scene, root, monkeypatch, cold)


def test_too_small_a_disk_ends_the_build_with_4_and_both_figures(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    base = scene.registry.put("small/base", [root, noise(30 * MB)])

    recipe = scene.recipe([base], "small/agent", f"{STEPS}\ncache = 0\ndisk = {20 * MB}")

    plan = scene.scene.start("images", "plan", str(recipe), "--json")
    command = scene.build(recipe)

    assert plan.wait(60) == 4, plan
    assert plan.document()["disk"] > plan.document()["disk_free"] == 20 * MB
    assert command.wait(60) == 4, command
    assert command.document()["state"] == "stopped"
    assert "MiB are needed, 19.1 MiB are free" in command.document()["reason"]
    assert scene.registry.tags("small/agent") == set()
    resumed = scene.scene.start("resume", str(scene.out), "--disk", "400MiB", "--json")
    assert resumed.wait(60) == 0, resumed
    assert resumed.document()["made"] == 1


def test_a_ctrl_c_in_mid_build_lets_that_build_end(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    bases = [scene.registry.put(f"drained/base-{number}", [root, noise(MB)]) for number in range(5)]
    slow = 'before = ["RUN sleep 2"]\nnetwork = "none"\nconcurrency = 1\ncache = 0'
    command = scene.build(scene.recipe(bases, "drained/agent", slow))
    until("one is being built", lambda: "RUN sleep" in said(scene.out / "logs"), 60)

    command.signal(signal.SIGINT)

    assert command.wait(60) == 3, command
    assert 0 < command.document()["made"] < 5 and command.document()["failed"] == 0, command
    assert command.document()["made"] == settled(scene.out)


def test_kill_9_in_mid_build_is_made_good_by_a_resume(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    images, records = daemon.images(), set(daemon.records())
    bases = [scene.registry.put(f"killed/base-{number}", [root, noise(MB)]) for number in range(3)]
    slow = 'before = ["RUN sleep 1"]\nnetwork = "none"\nconcurrency = 1\ncache = 0'
    command = scene.build(scene.recipe(bases, "killed/agent", slow))
    until("one is made", lambda: settled(scene.out) == 1, 60)
    until("another is being built", lambda: "RUN sleep" in said(scene.out / "logs"), 30)
    command.kill()

    resumed = scene.scene.start("resume", str(scene.out), "--json")

    assert resumed.wait(90) == 0, resumed
    assert resumed.document()["made"] + resumed.document()["present"] == 3
    audit = scene.scene.start("images", "audit", str(scene.out), "--json")
    assert audit.wait(30) == 0, audit
    assert daemon.images() == images
    assert set(daemon.records()) <= records
    assert not list(scene.temp.iterdir())


@pytest.mark.parametrize("away", [0.0, 3.0], ids=["at-once", "later"])
def test_the_death_of_the_daemon_during_builds_costs_no_image_or_retry(
    scene: DockerScene, root: bytes, monkeypatch: pytest.MonkeyPatch, away: float
) -> None:
    slow = 'before = ["RUN sleep 2"]\nnetwork = "none"\nconcurrency = 2\ncache = 0'
    for round in ("first", "second", "third"):
        name = f"died-{away}-{round}"
        bases = [scene.registry.put(f"{name}/base-{number}", [root, noise(MB)]) for number in range(4)]
        scene.out = scene.place / name
        with docker_daemon.daemon(scene.place / f"docker-{round}", 400 * MB) as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.host)
            command = scene.build(scene.recipe(bases, f"{name}/agent", slow), "--retries", "0")
            until("another is being built", lambda: "RUN sleep" in said(scene.out / "logs"), 60)

            daemon.kill()
            if away:
                command.live_on(away)
            daemon.start()

            status = command.wait(120)
        if not is_cache_damaged(said(scene.out / "logs", first=0)):  # by the kill: no build can mend that
            break
    assert status == 0, command
    assert (command.document()["made"], command.document()["failed"]) == (4, 0)


def said(logs: Path, first: int = 1) -> str:
    """What builds after the first have printed."""
    return "".join(path.read_text() for path in sorted(logs.glob("*.build.log"))[first:])


def test_both_engines_make_the_same_image_and_it_runs(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    odd = scene.agent / "odd"
    odd.mkdir(mode=0o2750)
    odd.chmod(0o2750)
    (odd / "größe").write_text("x")
    (odd / "link").symlink_to("größe")
    (odd / "hard").hardlink_to(odd / "größe")
    (odd / "setuid").write_bytes(b"y")
    (odd / "setuid").chmod(0o4755)
    settings = {"Env": ["PATH=/bin", "MODE=old"], "Cmd": ["sh"], "Labels": {"of": "base"}, "User": "root"}
    base = scene.registry.put("same/base", [root, noise(MB)], settings)
    seen = {}
    for engine in ("registry", "docker"):
        scene.out = scene.place / engine
        recipe = scene.recipe([base], f"same/{engine}", f'engine = "{engine}"\ncache = 0')
        command = scene.build(recipe)
        assert command.wait(90) == 0, command
        reference = manifest(scene)["images"][0]["made"]["reference"]
        daemon.docker("pull", "--quiet", reference)
        config = json.loads(daemon.docker("image", "inspect", reference))[0]["Config"]
        seen[engine] = {name: config[name] for name in KEPT}, exported(daemon, reference)
        assert daemon.docker("run", "--rm", "--network", "none", reference).strip() == "hello"
        daemon.docker("rmi", reference)

    registry, docker = seen["registry"], seen["docker"]
    assert registry[0] == docker[0]
    assert registry[1] == docker[1]
    assert registry[1]["opt/agent/odd/hard"][0] == "link"
    assert registry[1]["opt/agent/odd/setuid"][1] & 0o7777 == 0o4755
    assert registry[0]["Env"] == ["PATH=/bin", 'MODE=a "b" $c']
    assert registry[0]["Cmd"] is None


def test_a_python_agent_runs_in_a_base_that_has_no_python(
    scene: DockerScene, root: bytes, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_daemon.needed("patchelf")
    monkeypatch.setenv("DOCKER_HOST", daemon.host)
    layer_projects.project(scene.place / "project", TELLER)
    base = scene.registry.put("python/base", [root], {"Env": ["PATH=/bin"]})
    (scene.place / "bases.txt").write_text(f"base {base}\n")
    for engine in ("registry", "docker"):
        scene.out = scene.place / engine
        recipe = scene.place / f"python-{engine}.toml"
        recipe.write_text(
            f'[bases]\nfile = "bases.txt"\n[target]\nrepository = "{scene.registry.host}/python/{engine}"\n'
            '[agent]\nsource = "project"\nentrypoint = ["/opt/agent/bin/demo-agent"]\n'
            f'[build]\nengine = "{engine}"\ncache = 0\n'
        )

        command = scene.build(recipe)

        assert command.wait(110) == 0, command
        reference = manifest(scene)["images"][0]["made"]["reference"]
        assert daemon.docker("run", "--rm", "--network", "none", reference).strip() == "told b'\\xa5water'"
        daemon.docker("rmi", reference)


TELLER = """
import ssl, sqlite3, msgspec

def main():
    assert ssl.create_default_context().cert_store_stats()["x509_ca"] > 10
    print("told", msgspec.msgpack.encode("water"))
"""
KEPT = ("Env", "User", "WorkingDir", "Entrypoint", "Cmd", "Labels")
KINDS = {tarfile.REGTYPE: "file", tarfile.LNKTYPE: "link", tarfile.SYMTYPE: "symlink", tarfile.DIRTYPE: "dir"}


def exported(daemon: Daemon, reference: str) -> dict[str, tuple[Any, ...]]:
    """Every file of a container of it: kind, mode, owner, link, content."""
    container = daemon.docker("create", "--network", "none", reference).strip()
    try:
        content = daemon.raw("export", container)
    finally:
        daemon.docker("rm", container)
    found: dict[str, tuple[Any, ...]] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        for entry in files:
            file = files.extractfile(entry) if entry.isreg() else None
            kind = KINDS.get(entry.type, repr(entry.type))
            body = file.read() if file else b""
            found[entry.name] = kind, entry.mode, entry.uid, entry.gid, entry.linkname, body
    return found
