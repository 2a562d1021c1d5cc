"""A uv workspace as a layer: the checkout's own members and exactly the locked versions, or a refusal."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from tests.layer_projects import MEMBERS, OLDER, lock, package, repository, required, run_in, wheel, workspace

from holdwater.core.errors import BadInput
from holdwater.core.image import AgentSource, ImageLayer
from holdwater.core.records import GiB
from holdwater.image.layer.agent_layer import prepare_agent
from holdwater.image.layer.cache import LayerCache
from holdwater.image.layer.installer import Pins, UvInstaller, find_uv
from holdwater.image.layer.interpreter_search import find_interpreter
from holdwater.image.layer.program import ProgramRunner
from holdwater.image.layer.uv_checkout import read_uv_checkout
from holdwater.image.layer.uv_project import UvProject

PROBE = """
import importlib.metadata, json, platform
import demo_agent_server, demo_fetched, demo_sdk, demo_tools, demo_vendored, six
names = sorted(name.metadata["Name"] for name in importlib.metadata.distributions())
print(json.dumps({
    "python": platform.python_version(),
    "versions": {name: importlib.metadata.version(name) for name in names},
    "files": sorted({module.__file__ for module in (demo_sdk, demo_tools, demo_vendored, demo_fetched)}),
}))
"""
PACKAGES = "/opt/agent/lib/python3.12/site-packages"


class WorkspaceScene(msgspec.Struct):
    """A workspace, its layer, and a root with nothing but the layer."""

    agent: Path
    cache: Path
    layer: ImageLayer
    root: Path


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkspaceScene]:
    required("patchelf", "bwrap", "uv", "git")
    base = tmp_path_factory.mktemp("workspace")
    agent = workspace(base / "checkout")
    layer = asyncio.run(build_layer(agent, base / "cache"))
    (base / "root").mkdir()
    subprocess.run(["tar", "-xpzf", layer.path, "-C", base / "root"], check=True)
    yield WorkspaceScene(agent, base / "cache", layer, base / "root")


async def build_layer(agent: Path, cache: Path, python: str = "3.12") -> ImageLayer:
    async with LayerCache(cache, GiB) as layers:
        places = {"source": "images.toml:7"}
        source = AgentSource(source=str(agent), python=python, places=places)
        return (await prepare_agent(source, layers, cache / "log")).layer


def test_the_program_has_the_checkout_s_members_and_the_locked_versions(scene: WorkspaceScene) -> None:
    (scene.root / "probe.py").write_text(PROBE)

    ran = run_in(scene.root, "/opt/agent/bin/python", "/probe.py", env={})
    script = run_in(scene.root, "/opt/agent/bin/agent-server", env={})

    assert ran.returncode == 0, ran.stderr
    told = msgspec.json.decode(ran.stdout)
    assert told["python"].startswith("3.12.")
    own = {"demo-sdk", "demo-tools", "demo-agent-server", "demo-vendored", "demo-fetched"}
    assert told["versions"] == {**OLDER, **dict.fromkeys(own, "0.1")}
    assert all(file.startswith(PACKAGES) for file in told["files"]), told["files"]
    assert script.stdout == "demo-agent-server of the checkout\n", script.stderr


def test_the_lock_has_older_versions_than_uv_takes_without_it(scene: WorkspaceScene, tmp_path: Path) -> None:
    package(tmp_path / "new", "demo-new", list(OLDER))
    lock(tmp_path / "new")

    packages = tomllib.loads((tmp_path / "new" / "uv.lock").read_text())["package"]

    newest = {package["name"]: package["version"] for package in packages}
    assert [name for name in OLDER if newest[name] == OLDER[name]] == []


async def test_a_copy_elsewhere_gives_the_same_bytes(scene: WorkspaceScene, tmp_path: Path) -> None:
    """Given another place, other notes, other build products and another history, and an empty cache."""
    checkout = tmp_path / "elsewhere"
    shutil.copytree(scene.agent.parent, checkout)
    (checkout / "notes.txt").write_text("other notes")
    (checkout / "demo-sdk" / "build" / "lib" / "demo_sdk").mkdir(parents=True)
    (checkout / "demo-sdk" / "build" / "lib" / "demo_sdk" / "stale.py").write_text("")
    repository(checkout)

    layer = await build_layer(checkout / "demo-agent-server", tmp_path / "cache")

    assert (layer.digest, layer.diff_id) == (scene.layer.digest, scene.layer.diff_id)


async def test_an_unchanged_workspace_is_taken_from_the_cache(scene: WorkspaceScene) -> None:
    (scene.cache / "log").unlink()

    again = await build_layer(scene.agent, scene.cache)

    assert again == scene.layer
    assert "compileall" not in (scene.cache / "log").read_text()


async def test_the_lock_and_the_members_decide_about_the_layer_and_nothing_else(
    scene: WorkspaceScene, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(scene.agent.parent, checkout)
    before = await read_identity(checkout, tmp_path / "before")

    (checkout / "notes.txt").write_text("other notes")
    repository(checkout)
    same = await read_identity(checkout, tmp_path / "same")
    others: list[str] = []
    for name in ("uv.lock", *(f"{member}/more.txt" for member in MEMBERS), "vendor/vendored/more.txt"):
        with (checkout / name).open("a") as file:
            file.write("# more\n")
        others.append(await read_identity(checkout, tmp_path / f"other-{len(others)}"))

    assert same == before
    assert len({before, *others}) == 1 + len(others) == 7


async def read_identity(checkout: Path, copy: Path) -> str:
    """Return the identity of all files that the agent of the checkout is made of."""
    found = read_uv_checkout(checkout / "demo-agent-server")
    assert found is not None
    return await UvProject(found, copy).copy_files(copy / "cache")


async def test_a_workspace_without_a_lock_is_locked_in_the_copy_alone(
    scene: WorkspaceScene, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(scene.agent.parent, checkout)
    (checkout / "uv.lock").unlink()

    project, pins = await read_pins(checkout / "demo-agent-server", tmp_path)

    assert (project.root / "uv.lock").exists() and not (checkout / "uv.lock").exists()
    assert {"./demo-agent-server", "./demo-sdk", "./demo-tools", "./vendor/vendored"} <= set(pins)
    assert [pin for pin in pins if pin.startswith("six==") and "1.15.0" not in pin]


async def test_a_package_of_an_index_of_the_project_is_installed_from_it(tmp_path: Path) -> None:
    """Given a package that is on the project's own index alone, and another index that is not used."""
    required("uv")
    (tmp_path / "simple").mkdir()
    wheel(tmp_path / "simple" / "demo-part", "demo_part", "1.0")
    with serve_directory(tmp_path) as address:
        agent = package(tmp_path / "agent", "demo-agent", ["demo-part"])
        with (agent / "pyproject.toml").open("a") as file:
            for name, url in (("own", f"{address}/simple"), ("unused", "http://127.0.0.1:9/simple")):
                file.write(f'[[tool.uv.index]]\nname = "{name}"\nurl = "{url}"\nexplicit = true\n')
            file.write('[tool.uv.sources]\ndemo-part = {index = "own"}\n')
        await asyncio.to_thread(lock, agent)

        project, pins = await read_pins(agent, tmp_path)
        (tmp_path / "pins.txt").write_text("\n".join(pins))
        programs = ProgramRunner(tmp_path / "log", project.root, keep=[], env={})
        python = (await find_interpreter(programs, "3.12")).executable
        installer = UvInstaller(programs, find_uv() or "", python)
        await installer.install(tmp_path / "pins.txt", project.list_install_options(), tmp_path / "tree")

    assert project.list_install_options()[:2] == ("--index", f"{address}/simple")
    assert "http://127.0.0.1:9/simple" not in project.list_install_options()
    assert list((tmp_path / "tree").rglob("demo_part.py"))


async def test_extras_are_added_and_groups_for_developers_are_not(
    scene: WorkspaceScene, tmp_path: Path
) -> None:
    _, pins = await read_pins(scene.agent, tmp_path / "plain")
    _, more = await read_pins(scene.agent, tmp_path / "more", ("more",))

    assert {line.partition("==")[0] for line in more if "==" in line} == {*OLDER, "iniconfig"}
    assert {line.partition("==")[0] for line in pins if "==" in line} == set(OLDER)


async def read_pins(agent: Path, place: Path, extras: tuple[str, ...] = ()) -> tuple[UvProject, Pins]:
    place.mkdir(exist_ok=True)
    checkout = read_uv_checkout(agent)
    assert checkout is not None
    project = UvProject(checkout, place / "copy")
    await project.copy_files(place / "cache")
    programs = ProgramRunner(place / "log", place, keep=[], env={})
    python = (await find_interpreter(programs, "3.12")).executable
    return project, await project.read_pins(programs, python, extras)


@contextmanager
def serve_directory(directory: Path) -> Iterator[str]:
    """Yield the address at which a directory is served, with listings of its directories."""
    handler = partial(QuietHandler, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class QuietHandler(SimpleHTTPRequestHandler):
    """Serves files and prints no log."""

    def log_message(self, format: str, *args: object) -> None:
        return


def test_the_root_of_a_workspace_is_all_its_members(scene: WorkspaceScene, tmp_path: Path) -> None:
    found = read_uv_checkout(scene.agent.parent)

    assert found is not None
    assert found.name == ""
    assert [path.name for path in found.directories] == [*sorted(MEMBERS), "vendored"]


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def empty_submodule(checkout: Path) -> None:
    (checkout / ".gitmodules").write_text('[submodule "v"]\n\tpath = vendor/vendored\n\turl = ../v\n')
    shutil.rmtree(checkout / "vendor" / "vendored")
    (checkout / "vendor" / "vendored").mkdir()


def remove_path_source(checkout: Path) -> None:
    shutil.rmtree(checkout / "vendor")


def change_dependency(checkout: Path) -> None:
    change(checkout / "demo-sdk" / "pyproject.toml", "six>=1.10", "six>=1.16")


def move_git_source(checkout: Path) -> None:
    for name in ("uv.lock", "demo-agent-server/pyproject.toml"):
        change(checkout / name, "/fetched", "/not-there")


def leave_out_project(checkout: Path) -> None:
    file = checkout / "demo-agent-server" / "pyproject.toml"
    change(file, '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n', "")


REFUSALS: list[tuple[Callable[[Path], None], str]] = [
    (empty_submodule, "`HERE/.gitmodules`: the submodule is not checked out: `vendor/vendored`"),
    (
        remove_path_source,
        "`HERE/demo-tools/pyproject.toml`: `tool.uv.sources.demo-vendored`: no such file or directory: "
        "`../vendor/vendored`",
    ),
    (change_dependency, "`HERE/uv.lock` is out of date"),
    (move_git_source, "`HERE/uv.lock`: the git source `demo-fetched` cannot be fetched: `git+file:///"),
    (leave_out_project, "`HERE/demo-agent-server/pyproject.toml`: `build-system`: missing, so uv"),
]


async def test_a_lock_for_another_python_is_refused_with_a_hint(
    scene: WorkspaceScene, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match="incompatible with the project's Python requirement") as refused:
        await build_layer(scene.agent, tmp_path / "cache", python="3.11")

    assert refused.value.hint == "the recipe's `python` selects another one"


@pytest.mark.parametrize(("damage", "told"), REFUSALS, ids=lambda value: getattr(value, "__name__", ""))
async def test_a_checkout_that_cannot_be_honoured_is_refused(
    scene: WorkspaceScene, tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(scene.agent.parent, checkout)
    damage(checkout)

    with pytest.raises(BadInput) as refused:
        await build_layer(checkout / "demo-agent-server", tmp_path / "cache")

    assert refused.value.message.startswith(
        f"images.toml:7: `agent.source`: {told}".replace("HERE", str(checkout))
    )
    assert not list((tmp_path / "cache" / "layers").iterdir())
