"""Scenes for layers: a small Python project, a wheel, and a root with nothing in it but a layer."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.wait_bounds import stretch

from holdwater.image.layer.installer import find_uv

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
