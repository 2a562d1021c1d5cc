"""Find the files of a uv project: the members of its workspace, its path sources, lock and submodules.

It reads files and runs nothing. `uv_project.py` copies them and lets uv read the lock.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from itertools import takewhile
from os.path import commonpath
from pathlib import Path
from typing import Any

import msgspec

from ...core.errors import BadInput
from ...core.records import Record

PYPROJECT = "pyproject.toml"
LOCK = "uv.lock"
OTHER_LOCKS = ("poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock")
SUBMODULES = ".gitmodules"
SUBMODULE_PATH = re.compile(r"^\s*path\s*=\s*(.+?)\s*$", re.MULTILINE)
GLOB = re.compile(r"[*?\[]")


class _DependencySource(msgspec.Struct):
    """An entry of `tool.uv.sources`. Only a path needs files."""

    path: str | None = None


class _WorkspaceTable(msgspec.Struct):
    members: list[str] = msgspec.field(default_factory=list)
    exclude: list[str] = msgspec.field(default_factory=list)


class _PackageIndex(msgspec.Struct):
    url: str


class _UvTable(msgspec.Struct):
    workspace: _WorkspaceTable | None = None
    sources: dict[str, _DependencySource | list[_DependencySource]] = msgspec.field(default_factory=dict)
    index: list[_PackageIndex] = msgspec.field(default_factory=list)
    package: bool | None = None


class _ToolTable(msgspec.Struct):
    uv: _UvTable = msgspec.field(default_factory=_UvTable)


class _ProjectTable(msgspec.Struct):
    name: str = ""


class ProjectFile(msgspec.Struct, rename="kebab"):
    """The tables of a `pyproject.toml` that decide which files are needed."""

    project: _ProjectTable | None = None
    build_system: dict[str, Any] | None = None
    tool: _ToolTable = msgspec.field(default_factory=_ToolTable)

    @property
    def is_package(self) -> bool:
        """Whether uv installs the project itself, beside its dependencies."""
        if self.project is None:
            return False
        package = self.tool.uv.package
        return self.build_system is not None if package is None else package


class UvCheckout(Record, frozen=True):
    """The files of a project that only uv understands."""

    name: str  # the package to install; empty: all packages of the workspace
    root: Path  # has the lock
    is_locked: bool
    directories: tuple[Path, ...]  # whole
    files: tuple[Path, ...]
    indexes: tuple[str, ...] = ()  # addresses that the project declares

    @property
    def top(self) -> Path:
        """The directory that everything is below."""
        return Path(commonpath([self.root, *self.directories, *(file.parent for file in self.files)]))


def read_uv_checkout(project: Path) -> UvCheckout | None:
    """Return the project's checkout; None for a project without uv's lock, workspace and sources."""
    project = project.resolve()
    _check_submodules(project)
    if not (project / PYPROJECT).is_file():
        return None
    content = read_pyproject(project)
    root = find_root(project)
    uv = content.tool.uv
    if not (uv.sources or uv.workspace or root != project or (root / LOCK).is_file()):
        for name in OTHER_LOCKS:
            if (project / name).exists():
                hint = "only `uv.lock` is understood: give that, or `directory` with the agent installed"
                raise BadInput(f"this lock cannot be honoured: `{project / name}`", hint)
        return None
    if content.project is not None and not content.is_package:
        raise BadInput(
            f"`{project / PYPROJECT}`: `build-system`: missing, so uv would leave out the project itself",
            "add it, or set `package = true` in `tool.uv`",
        )
    return _CheckoutReader().read(content, root)


def read_pyproject(directory: Path) -> ProjectFile:
    path = directory / PYPROJECT
    try:
        return msgspec.convert(tomllib.loads(path.read_text("utf-8")), ProjectFile)
    except OSError as error:
        raise BadInput(f"cannot read `{path}`: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"`{path}`: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        said, _, place = str(error).partition(" - at `$.")
        raise BadInput(f"`{path}`: `{place.rstrip('`')}`: {said[0].lower()}{said[1:]}") from None


def find_root(project: Path) -> Path:
    """Return the root of the workspace that has the project as a member; otherwise the project."""
    for directory in (project, *project.parents):
        if (directory / PYPROJECT).is_file():
            workspace = read_pyproject(directory).tool.uv.workspace
            if workspace is not None:
                return directory if project in (directory, *_list_members(directory, workspace)) else project
    return project


def _list_members(root: Path, workspace: _WorkspaceTable) -> Iterator[Path]:
    excluded = {path for pattern in workspace.exclude for path in _match_paths(root, pattern)}
    for pattern in workspace.members:
        for path in _match_paths(root, pattern):
            if path not in excluded and (path / PYPROJECT).is_file():
                yield path


def _match_paths(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(path.resolve() for path in root.glob(pattern.rstrip("/")))
    except (ValueError, NotImplementedError):
        raise BadInput(f"`{root / PYPROJECT}`: `tool.uv.workspace`: invalid pattern: `{pattern}`") from None


class _CheckoutReader:
    """Collects what a project needs, through the path sources of all packages that it meets."""

    def __init__(self) -> None:
        self._directories: set[Path] = set()  # bound: the packages of the checkout
        self._files: set[Path] = set()
        self._read: set[Path] = set()

    def read(self, content: ProjectFile, root: Path) -> UvCheckout:
        self._read_workspace(root)
        whole = {
            path
            for path in self._directories
            if not any(above in self._directories for above in path.parents)
        }
        return UvCheckout(
            name=content.project.name if content.project else "",
            root=root,
            is_locked=(root / LOCK).is_file(),
            directories=tuple(sorted(whole)),
            files=tuple(sorted(self._files)),
            indexes=tuple(index.url.rstrip("/") for index in read_pyproject(root).tool.uv.index),
        )

    def _read_workspace(self, root: Path) -> None:
        workspace = read_pyproject(root).tool.uv.workspace or _WorkspaceTable()
        self._files |= {path for name in (LOCK, "uv.toml") if (path := root / name).is_file()}
        for pattern in workspace.members:
            plain = takewhile(lambda part: not GLOB.search(part), Path(pattern).parts)
            _check_submodules(root.joinpath(*plain))
        self._read_package(root, root)
        for member in _list_members(root, workspace):
            self._read_package(member, root)

    def _read_package(self, package: Path, root: Path) -> None:
        """Add a package of the workspace at `root`, and everything that its sources name."""
        if package in self._read:
            return
        self._read.add(package)
        content = read_pyproject(package)
        if package != root or content.is_package:
            _check_submodules(package)
            self._directories.add(package)
        between = (package, *takewhile(lambda above: above != root, package.parents))
        self._files |= {path for above in (*between, root) if (path := above / PYPROJECT).is_file()}
        for name, sources in content.tool.uv.sources.items():
            for source in sources if isinstance(sources, list) else [sources]:
                if source.path is not None:
                    self._read_path(package, source.path, name)

    def _read_path(self, package: Path, given: str, name: str) -> None:
        field = f"`{package / PYPROJECT}`: `tool.uv.sources.{name}`"
        if Path(given).is_absolute():
            raise BadInput(f"{field}: an absolute path cannot be copied with the project: `{given}`")
        path = (package / given).resolve()
        _check_submodules(path)
        if path.is_file():
            self._files.add(path)
        elif path.is_dir():
            self._directories.add(path)
            if (path / PYPROJECT).is_file():
                self._read_workspace(find_root(path))
        else:
            raise BadInput(f"{field}: no such file or directory: `{given}`")


def _check_submodules(needed: Path) -> None:
    """Raise BadInput if the directory contains, or lies in, a git submodule that is not checked out."""
    for directory in (needed, *needed.parents):
        _check_submodules_of(directory, needed)


def _check_submodules_of(directory: Path, needed: Path) -> None:
    try:
        text = (directory / SUBMODULES).read_text("utf-8", errors="replace")
    except OSError:
        return
    for name in SUBMODULE_PATH.findall(text):
        submodule = directory / name
        if not (submodule.is_relative_to(needed) or needed.is_relative_to(submodule)):
            continue
        if not submodule.is_dir() or not any(submodule.iterdir()):
            raise BadInput(
                f"`{directory / SUBMODULES}`: the submodule is not checked out: `{name}`",
                f"`git -C {directory} submodule update --init --recursive`",
            )
        if submodule.is_relative_to(needed):
            _check_submodules_of(submodule, needed)
