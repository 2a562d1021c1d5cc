"""A Python project as a layer: it runs where there is nothing else, and is the same each time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.layer_projects import backend, project, required, run_in, wheel
from tests.wait_bounds import stretch

from holdwater.core.errors import BadInput, ImageFailed
from holdwater.core.image import AgentSource
from holdwater.core.records import GiB
from holdwater.image.layer.agent_layer import PackagedAgent, prepare_agent
from holdwater.image.layer.cache import LayerCache
from holdwater.image.layer.installer import PackageInstaller, PipInstaller, UvInstaller, find_uv
from holdwater.image.layer.interpreter_search import find_interpreter
from holdwater.image.layer.program import ProgramRunner
from holdwater.image.layer.project_copy import copy_project

PACKAGES = f"/opt/agent/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
PROBE = """
import ctypes, json, multiprocessing, pathlib, socket, sqlite3, ssl, subprocess, sys, threading
import demo_agent, msgspec
child = subprocess.run([sys.executable, "-c", "import zlib; print('child')"], capture_output=True, text=True)
maps = [line.split()[-1] for line in open("/proc/self/maps")]
print(json.dumps({
    "authorities": len(ssl.create_default_context().get_ca_certs()),
    "localhost": socket.getaddrinfo("localhost", 80)[0][4][0],
    "sqlite": sqlite3.connect(":memory:").execute("select 1").fetchone()[0],
    "child": child.stdout.strip(),
    "compiled": msgspec.json.encode({"a": 1}).decode(),
    "code": demo_agent.__cached__,
    "file": demo_agent.main.__code__.co_filename,
    "foreign": sorted({m for m in maps if m.startswith("/") and not m.startswith("/opt/agent/")}),
}))
"""


WHEEL_METADATA = """
import pathlib, zipfile
name = "demo_agent-0.1-py3-none-any.whl"
text = "Metadata-Version: 2.1\\nName: demo-agent\\nVersion: 0.1\\nProvides-Extra: more\\n"
text += "Requires-Dist: demo-part; extra == 'more'\\n"
kind = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
with zipfile.ZipFile(pathlib.Path(directory, name), "w") as archive:
    archive.writestr("demo_agent-0.1.dist-info/METADATA", text)
    archive.writestr("demo_agent-0.1.dist-info/WHEEL", kind)
    archive.writestr("demo_agent-0.1.dist-info/RECORD", "")
return name
"""


class Scene(msgspec.Struct):
    """A package that was built, and unpacked into a root of its own."""

    project: Path
    before: list[tuple[str, int]]
    packaged: PackagedAgent
    root: Path
    lag: float


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    required("patchelf", "bwrap")
    base = tmp_path_factory.mktemp("package")
    source = project(base / "project")
    before = listing(source)
    packaged, lag = asyncio.run(built(source, base / "cache"))
    root = base / "root"
    root.mkdir()
    subprocess.run(["tar", "-xpzf", packaged.layer.path, "-C", root], check=True)
    yield Scene(project=source, before=before, packaged=packaged, root=root, lag=lag)


async def built(source: Path, cache: Path) -> tuple[PackagedAgent, float]:
    """The package, and the longest that the loop stood still meanwhile."""
    lag = 0.0

    async def watch() -> None:
        nonlocal lag
        while True:
            asked = time.monotonic()
            await asyncio.sleep(0.01)
            lag = max(lag, time.monotonic() - asked - 0.01)

    async with LayerCache(cache, GiB) as layers, asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        packaged = await prepare_agent(AgentSource(source=str(source)), layers, cache / "log")
        watching.cancel()
    return packaged, lag


def listing(directory: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns) for path in [directory, *directory.rglob("*")])


def test_an_agent_runs_without_python_and_uses_nothing_of_the_machine(scene: Scene) -> None:
    (scene.root / "probe.py").write_text(PROBE)

    ran = run_in(scene.root, "/opt/agent/bin/python", "/probe.py", env=scene.packaged.env)

    assert ran.returncode == 0, ran.stderr
    told = msgspec.json.decode(ran.stdout)
    assert told.pop("authorities") > 50
    assert told == {
        "localhost": "127.0.0.1",
        "sqlite": 1,
        "child": "child",
        "compiled": '{"a":1}',
        "code": f"{PACKAGES}/demo_agent/__pycache__/__init__.{sys.implementation.cache_tag}.pyc",
        "file": f"{PACKAGES}/demo_agent/__init__.py",
        "foreign": [],
    }


def test_a_console_script_runs_by_itself(scene: Scene) -> None:
    ran = run_in(scene.root, "/opt/agent/bin/demo-agent", env={})

    assert (ran.returncode, ran.stdout) == (0, "acted\n"), ran.stderr
    assert (scene.root / "opt/agent/bin/demo-agent").read_text().startswith("#!/opt/agent/bin/python\n")


def test_two_builds_of_the_same_inputs_are_the_same_layer(scene: Scene, tmp_path: Path) -> None:
    other = project(tmp_path / "elsewhere")
    os.utime(other / "pyproject.toml", (1, 1))
    (other / "src" / "demo_agent" / "__pycache__").mkdir()
    old_mask = os.umask(0o077)
    try:
        packaged, _ = asyncio.run(built(other, tmp_path / "cache"))
    finally:
        os.umask(old_mask)

    assert packaged.layer.path != scene.packaged.layer.path
    assert packaged.layer.digest == scene.packaged.layer.digest
    assert packaged.layer.diff_id == scene.packaged.layer.diff_id


def test_the_project_s_directory_is_not_touched_and_the_scratch_is_gone(scene: Scene) -> None:
    cache = Path(scene.packaged.layer.path).parents[2]

    assert listing(scene.project) == scene.before
    assert not list((cache / "scratch").iterdir())


def test_nothing_in_the_layer_tells_where_it_was_built(scene: Scene) -> None:
    cache = str(Path(scene.packaged.layer.path).parents[2]).encode()

    tells = [
        path for path in scene.root.rglob("opt/agent/**/*") if path.is_file() and cache in path.read_bytes()
    ]

    assert not tells


def test_the_loop_goes_on_while_a_package_is_built(scene: Scene) -> None:
    assert scene.lag < stretch(1.0)


async def test_the_same_project_is_taken_from_the_cache(scene: Scene) -> None:
    cache = Path(scene.packaged.layer.path).parents[2]
    log = cache / "log-2"
    async with LayerCache(cache, GiB) as layers:
        again = await prepare_agent(AgentSource(source=str(scene.project)), layers, log)

    assert again == scene.packaged
    assert "compileall" not in log.read_text()


async def test_a_failed_build_is_reported_with_its_last_lines_and_leaves_nothing(tmp_path: Path) -> None:
    required("patchelf", "uv")
    source = backend(
        tmp_path / "project", "print('https://me:secret@index/simple')\nraise SystemExit('broken on purpose')"
    )
    async with LayerCache(tmp_path / "cache", GiB) as layers:
        with pytest.raises(ImageFailed, match="broken on purpose") as failed:
            await prepare_agent(AgentSource(source=str(source)), layers, tmp_path / "build.log")

        assert not list((tmp_path / "cache" / "scratch").iterdir())
    assert str(tmp_path / "build.log") in failed.value.message
    assert "broken on purpose" in (tmp_path / "build.log").read_text()
    assert "secret" not in failed.value.message + (tmp_path / "build.log").read_text()


async def test_without_patchelf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with LayerCache(tmp_path / "cache", GiB) as layers:
        with pytest.raises(BadInput, match="`patchelf`"):
            await prepare_agent(AgentSource(package="x"), layers, tmp_path / "log")


@pytest.mark.parametrize("kind", ["uv", "pip"])
async def test_a_requirement_without_a_version_is_what_it_comes_to_now(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required(kind)
    for name in ("UV", "PIP"):
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(tmp_path / "wheels"))
    programs = ProgramRunner(tmp_path / "log", tmp_path, keep=[], env={})
    python = (await find_interpreter(programs)).executable
    installer: PackageInstaller = (
        UvInstaller(programs, find_uv() or "", python) if kind == "uv" else PipInstaller(programs, python)
    )

    wheel(tmp_path / "wheels", "demo_part", "1.0")
    first = await installer.resolve("demo-part", tmp_path)
    wheel(tmp_path / "wheels", "demo_part", "1.1")
    second = await installer.resolve("demo-part", tmp_path)

    assert [pin.replace("_", "-") for pin in (*first, *second)] == ["demo-part==1.0", "demo-part==1.1"]


@pytest.mark.parametrize("kind", ["uv", "pip"])
async def test_extras_of_a_project_are_resolved(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required(kind)
    for name in ("UV", "PIP"):
        monkeypatch.setenv(f"{name}_NO_INDEX", "1")
        monkeypatch.setenv(f"{name}_FIND_LINKS", str(tmp_path / "wheels"))
    wheel(tmp_path / "wheels", "demo_part", "1.0")
    source = backend(tmp_path / "project", WHEEL_METADATA)
    with (source / "pyproject.toml").open("a") as file:
        file.write('[project.optional-dependencies]\nmore = ["demo-part"]\n')
    programs = ProgramRunner(tmp_path / "log", tmp_path, keep=[], env={})
    python = (await find_interpreter(programs)).executable
    installer: PackageInstaller = (
        UvInstaller(programs, find_uv() or "", python) if kind == "uv" else PipInstaller(programs, python)
    )

    pins = [await installer.resolve(source, tmp_path, extras) for extras in ((), ("more",))]

    assert [[pin.replace("_", "-") for pin in found] for found in pins] == [[], ["demo-part==1.0"]]


def test_a_copy_of_a_project_omits_build_products_and_resolves_outside_links(tmp_path: Path) -> None:
    source = project(tmp_path / "project")
    (tmp_path / "README.md").write_text("read me")
    (source / "README.md").symlink_to("../README.md")
    (source / "inner").symlink_to("src/demo_agent")
    (source / "absolute.toml").symlink_to(source / "pyproject.toml")
    (source / "above").symlink_to("..")
    for name in (
        ".git",
        ".venv",
        "build",
        "src/demo_agent/__pycache__",
        "src/x.egg-info",
        "src/demo_agent/build",
    ):
        (source / name).mkdir()
        (source / name / "file").write_text("")
    os.mkfifo(source / "pipe")
    copy = source / "cache" / "copy"  # inside of what is copied
    copy.parent.mkdir()

    copy_project(source, copy, source / "cache", lambda: None)

    names = {str(path.relative_to(copy)) for path in copy.rglob("*")}
    assert {name for name in names if "/" not in name} == {
        "README.md",
        "absolute.toml",
        "inner",
        "pyproject.toml",
        "src",
    }
    assert "src/demo_agent/build/file" in names
    assert not {name for name in names if "__pycache__" in name or "egg-info" in name}
    assert (copy / "README.md").read_text() == "read me"
    assert (copy / "inner").readlink() == Path("src/demo_agent")
