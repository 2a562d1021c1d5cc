"""Install Python packages into a tree, with `uv` if it is available and `pip` otherwise.

All versions are resolved before the build, so the installed versions are the ones in the layer's key.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ...core.errors import BadInput, ImageFailed
from .interpreter import PythonInterpreter
from .program import ProgramRunner

RESOLVING = 600.0  # seconds
BUILDING = 1800.0
INSTALLING = 1800.0

Pins = tuple[str, ...]  # `name==version`, or `name @ address`


class PackageInstaller(Protocol):
    """Resolves, builds and installs Python packages."""

    name: str  # part of the layer's key: each installer leaves its own traces in the files

    async def resolve(self, asked: str | Path, scratch: Path, extras: Sequence[str] = ()) -> Pins:
        """Return the pins of a requirement and its dependencies, or of a project's dependencies alone."""

    async def build_wheel(self, project: Path, into: Path) -> Path:
        """Build a wheel of the project; return its path."""

    async def install(self, pins: Path, more: Sequence[str | Path], tree: Path) -> None:
        """Install exactly these pins, without their dependencies; `more` are wheels, and options."""


async def find_installer(programs: ProgramRunner, interpreter: PythonInterpreter) -> PackageInstaller:
    if (uv := find_uv()) is not None:
        return UvInstaller(programs, uv, interpreter.executable)
    try:
        await programs.run([interpreter.executable, "-m", "pip", "--version"], RESOLVING)
    except ImageFailed as e:
        raise BadInput("neither `uv` nor `pip` was found to install the agent", "install `uv`") from e
    return PipInstaller(programs, interpreter.executable)


def find_uv() -> str | None:
    """Return the path of the `uv` beside this interpreter, or of the machine's."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


class UvInstaller:
    """Installs with `uv` and its settings on this machine."""

    name = "uv"

    def __init__(self, programs: ProgramRunner, uv: str, python: Path) -> None:
        self._programs = programs
        self._uv = uv
        self._python = ["--python", str(python)]

    async def resolve(self, asked: str | Path, scratch: Path, extras: Sequence[str] = ()) -> Pins:
        pins = scratch / "resolved.txt"
        options = ["--quiet", "--upgrade", "--no-header", "--no-annotate", "--output-file", str(pins)]
        options += [word for extra in extras for word in ("--extra", extra)]
        await self._programs.run(
            [self._uv, "pip", "compile", *options, *self._python, _requirement_file(asked, scratch)],
            RESOLVING,
        )
        return tuple(line for line in pins.read_text().splitlines() if line.strip())

    async def build_wheel(self, project: Path, into: Path) -> Path:
        options = ["--wheel", "--out-dir", str(into), *self._python]
        await self._programs.run([self._uv, "build", *options, project], BUILDING)
        return _find_wheel(into)

    async def install(self, pins: Path, more: Sequence[str | Path], tree: Path) -> None:
        # Copy mode: links would point into uv's cache, and later steps change the files.
        options = ["--no-deps", "--link-mode", "copy", "--prefix", str(tree), "--requirement", str(pins)]
        await self._programs.run([self._uv, "pip", "install", *options, *self._python, *more], INSTALLING)


class PipInstaller:
    """Installs with the `pip` of the interpreter that is copied."""

    name = "pip"

    def __init__(self, programs: ProgramRunner, python: Path) -> None:
        self._programs = programs
        self._pip: list[str | Path] = [python, "-m", "pip"]

    async def resolve(self, asked: str | Path, scratch: Path, extras: Sequence[str] = ()) -> Pins:
        report = scratch / "resolved.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        wanted = f"{asked}[{','.join(extras)}]" if extras else asked
        await self._programs.run([*self._pip, "install", *options, wanted], RESOLVING)
        items = msgspec.json.decode(report.read_bytes(), type=_PipReport).install
        return tuple(sorted(item.pin for item in items if not item.is_project))

    async def build_wheel(self, project: Path, into: Path) -> Path:
        await self._programs.run([*self._pip, "wheel", "--no-deps", "--wheel-dir", into, project], BUILDING)
        return _find_wheel(into)

    async def install(self, pins: Path, more: Sequence[str | Path], tree: Path) -> None:
        options = ["--no-deps", "--no-compile", "--ignore-installed", "--no-warn-script-location"]
        await self._programs.run(
            [*self._pip, "install", *options, "--prefix", tree, "--requirement", pins, *more], INSTALLING
        )


class _PackageMetadata(msgspec.Struct):
    name: str
    version: str


class _ReportItem(msgspec.Struct):
    """One package of pip's report."""

    metadata: _PackageMetadata
    download_info: dict[str, msgspec.Raw]
    is_direct: bool

    @property
    def is_project(self) -> bool:
        return "dir_info" in self.download_info

    @property
    def pin(self) -> str:
        if self.is_direct:
            address = msgspec.json.decode(self.download_info["url"], type=str)
            return f"{self.metadata.name} @ {address}"
        return f"{self.metadata.name}=={self.metadata.version}"


class _PipReport(msgspec.Struct):
    install: list[_ReportItem]


def _requirement_file(asked: str | Path, scratch: Path) -> Path:
    """Return a file with the requirement, or the project's own metadata file."""
    if isinstance(asked, str):
        (scratch / "asked.in").write_text(f"{asked}\n")
        return scratch / "asked.in"
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        if (asked / name).exists():
            return asked / name
    raise BadInput("the agent's source is not a Python project: it has no `pyproject.toml` and no `setup.py`")


def _find_wheel(directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ImageFailed(f"the project's build produced {len(wheels)} wheels, expected one", again=False)
    return wheels[0]
