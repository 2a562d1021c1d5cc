"""Python packages into a tree, with `uv` where there is one and `pip` otherwise.

Versions are settled before anything is built: what is installed is what a layer's key was made of.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Protocol

import msgspec

from ...core.errors import BadInput, ImageFailed
from .interpreter import Interpreter
from .program import Programs

RESOLVING = 600.0  # seconds
BUILDING = 1800.0
INSTALLING = 1800.0

Pins = tuple[str, ...]  # `name==version`, or `name @ address`


class Installer(Protocol):
    """Resolves, builds and installs."""

    name: str  # each leaves traces of its own in what it installs

    async def resolve(self, asked: str | Path, scratch: Path) -> Pins:
        """All that a requirement, or a project's directory (without itself), comes to."""

    async def wheel(self, project: Path, into: Path) -> Path:
        """A wheel of the project."""

    async def install(self, pins: Path, wheels: list[Path], tree: Path) -> None:
        """Exactly these, with nothing that they depend on."""


async def find_installer(programs: Programs, interpreter: Interpreter) -> Installer:
    if (uv := find_uv()) is not None:
        return Uv(programs, uv, interpreter.executable)
    try:
        await programs.run([interpreter.executable, "-m", "pip", "--version"], RESOLVING)
    except ImageFailed as e:
        raise BadInput("neither `uv` nor `pip` is found to install the agent with", "install `uv`") from e
    return Pip(programs, interpreter.executable)


def find_uv() -> str | None:
    """The `uv` that is installed beside this interpreter, or on the machine."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


class Uv:
    """`uv`, with the settings that it has on this machine."""

    name = "uv"

    def __init__(self, programs: Programs, uv: str, python: Path) -> None:
        self._programs = programs
        self._uv = uv
        self._python = ["--python", str(python)]

    async def resolve(self, asked: str | Path, scratch: Path) -> Pins:
        pins = scratch / "resolved.txt"
        options = ["--quiet", "--upgrade", "--no-header", "--no-annotate", "--output-file", str(pins)]
        await self._programs.run(
            [self._uv, "pip", "compile", *options, *self._python, _described(asked, scratch)], RESOLVING
        )
        return tuple(line for line in pins.read_text().splitlines() if line.strip())

    async def wheel(self, project: Path, into: Path) -> Path:
        options = ["--wheel", "--out-dir", str(into), *self._python]
        await self._programs.run([self._uv, "build", *options, project], BUILDING)
        return _only(into)

    async def install(self, pins: Path, wheels: list[Path], tree: Path) -> None:
        # Copied: a link would lead into uv's own cache, and the files are changed afterwards.
        options = ["--no-deps", "--link-mode", "copy", "--prefix", str(tree), "--requirement", str(pins)]
        await self._programs.run([self._uv, "pip", "install", *options, *self._python, *wheels], INSTALLING)


class Pip:
    """`pip`, of the interpreter that is copied."""

    name = "pip"

    def __init__(self, programs: Programs, python: Path) -> None:
        self._programs = programs
        self._pip: list[str | Path] = [python, "-m", "pip"]

    async def resolve(self, asked: str | Path, scratch: Path) -> Pins:
        report = scratch / "resolved.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        await self._programs.run([*self._pip, "install", *options, asked], RESOLVING)
        items = msgspec.json.decode(report.read_bytes(), type=_Report).install
        return tuple(sorted(item.pin for item in items if not item.is_project))

    async def wheel(self, project: Path, into: Path) -> Path:
        await self._programs.run([*self._pip, "wheel", "--no-deps", "--wheel-dir", into, project], BUILDING)
        return _only(into)

    async def install(self, pins: Path, wheels: list[Path], tree: Path) -> None:
        options = ["--no-deps", "--no-compile", "--ignore-installed", "--no-warn-script-location"]
        await self._programs.run(
            [*self._pip, "install", *options, "--prefix", tree, "--requirement", pins, *wheels], INSTALLING
        )


class _Metadata(msgspec.Struct):
    name: str
    version: str


class _Item(msgspec.Struct):
    """One line of pip's report."""

    metadata: _Metadata
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


class _Report(msgspec.Struct):
    install: list[_Item]


def _described(asked: str | Path, scratch: Path) -> Path:
    """A file that says what is asked for."""
    if isinstance(asked, str):
        (scratch / "asked.in").write_text(f"{asked}\n")
        return scratch / "asked.in"
    for name in ("pyproject.toml", "setup.py", "setup.cfg"):
        if (asked / name).exists():
            return asked / name
    raise BadInput("the agent's source is no Python project: it has no `pyproject.toml` and no `setup.py`")


def _only(directory: Path) -> Path:
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ImageFailed(f"the project's build gave {len(wheels)} wheels in place of one", again=False)
    return wheels[0]
