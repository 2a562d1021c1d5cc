"""Scenes for layers: a small Python project, a wheel, and a root with nothing in it but a layer."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.image.layer.installer import find_uv
from holdwater.image.layer.interpreter_search import find_interpreter
from holdwater.image.layer.program import ProgramRunner

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "demo-agent"
version = "0.1"
dependencies = ["msgspec"]

[project.scripts]
demo-agent = "demo_agent:main"
"""


def project(directory: Path, code: str = "def main():\n    print('acted')\n") -> Path:
    """A project with a compiled dependency and a console script."""
    (directory / "src" / "demo_agent").mkdir(parents=True)
    (directory / "pyproject.toml").write_text(PROJECT)
    (directory / "src" / "demo_agent" / "__init__.py").write_text(code)
    return directory


def backend(directory: Path, code: str) -> Path:
    """A project whose build is `code`."""
    directory.mkdir()
    (directory / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "builds"\nbackend-path = ["."]\n'
        '[project]\nname = "demo-agent"\nversion = "0.1"\ndependencies = []\n'
    )
    body = "\n".join(f"    {line}" for line in code.splitlines())
    (directory / "builds.py").write_text(
        f"def build_wheel(directory, settings=None, metadata=None):\n{body}\n"
    )
    return directory


OLDER = {"six": "1.15.0", "optype": "0.3.1", "idna": "2.10"}  # optype is for 3.12 and newer
MEMBERS = {
    "demo-sdk": ["six>=1.10", "optype>=0.3"],
    "demo-tools": ["demo-sdk", "demo-vendored", "idna>=2"],
    "demo-workspace": ["demo-sdk", "demo-agent-server"],
    "demo-agent-server": ["demo-sdk", "demo-tools", "demo-fetched"],
}
ROOT_TABLES = """
[tool.uv.workspace]
members = ["demo-*"]

[tool.uv]
constraint-dependencies = ["six<2"]

[dependency-groups]
dev = ["iniconfig"]

[[tool.uv.index]]
name = "unused"
url = "http://127.0.0.1:9/simple"
explicit = true

[tool.uv.sources]
demo-sdk = {workspace = true}
demo-tools = {workspace = true}
demo-agent-server = {workspace = true}
"""


def workspace(directory: Path) -> Path:
    """A checkout with a virtual root, four members, a path source, a git source, and a lock by uv.

    The lock names older versions than the newest. Return the member that is the agent.
    """
    for name, dependencies in MEMBERS.items():
        package(directory / name, name, dependencies)
    (directory / "pyproject.toml").write_text(ROOT_TABLES)
    with (directory / "demo-tools" / "pyproject.toml").open("a") as file:
        file.write('[tool.uv.sources]\ndemo-vendored = {path = "../vendor/vendored", editable = true}\n')
    package(directory / "vendor" / "vendored", "demo-vendored", [])
    fetched = repository(package(directory.parent / "fetched", "demo-fetched", []))
    agent = directory / "demo-agent-server"
    with (agent / "pyproject.toml").open("a") as file:
        file.write("[project.scripts]\nagent-server = 'demo_agent_server:main'\n")
        file.write("[project.optional-dependencies]\nmore = ['iniconfig']\n")
        file.write(f'[tool.uv.sources]\ndemo-fetched = {{git = "file://{fetched}"}}\n')
    (directory / "notes.txt").write_text("for people")
    lock(directory, *(f"--upgrade-package={name}=={version}" for name, version in OLDER.items()))
    return agent


def package(directory: Path, name: str, dependencies: list[str]) -> Path:
    """A package with one module that tells where it is from."""
    module = name.replace("-", "_")
    (directory / module).mkdir(parents=True)
    (directory / "pyproject.toml").write_text(
        f'[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[tool.setuptools]\npackages = ["{module}"]\n'
        f'[project]\nname = "{name}"\nversion = "0.1"\nrequires-python = ">=3.12"\n'
        f"dependencies = {dependencies}\n"
    )
    imports = "".join(f"import {dep.split('>')[0].replace('-', '_')}\n" for dep in dependencies)
    (directory / module / "__init__.py").write_text(
        f"{imports}\ndef main():\n    print('{name} of the checkout')\n"
    )
    return directory


def repository(directory: Path) -> Path:
    """The directory as a git repository with one commit."""
    git: list[str] = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, *words], check=True, timeout=stretch(30))
    return directory


def lock(directory: Path, *options: str) -> None:
    """Let uv write the lock of a project, for Python 3.12."""
    uv = find_uv()
    assert uv is not None
    programs = ProgramRunner(directory.parent / "lock.log", directory, keep=[], env={})
    python = asyncio.run(find_interpreter(programs, "3.12")).executable
    subprocess.run(
        [uv, "lock", "--quiet", "--directory", directory, "--python", python, *options],
        check=True,
        timeout=stretch(120),
    )


def wheel(directory: Path, name: str, version: str) -> Path:
    """An empty wheel."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{version}-py3-none-any.whl"
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(
            f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{information}/RECORD", "")
    return path


def required(*programs: str) -> None:
    """Skip, where that is allowed, without these."""
    missing = [program for program in programs if shutil.which(program) is None]
    missing = [program for program in missing if program != "uv" or find_uv() is None]
    if missing:
        reason = f"not installed: {', '.join(missing)}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)


def run_in(root: Path, *argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program where there is nothing but `root`, and what every container has."""
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    walls = ["--bind", root, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--unshare-all"]
    settings = [word for name, value in env.items() for word in ("--setenv", name, value)]
    return subprocess.run(
        ["bwrap", *walls, "--clearenv", *settings, *argv],
        capture_output=True,
        text=True,
        timeout=stretch(60),
        check=False,
    )
