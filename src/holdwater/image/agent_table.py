"""The table `[agent]` of an `images.toml`: the source of the agent's files, and the images' configuration.

`layer/agent_layer.py` makes the layer.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import AgentSource, ConfigEdits
from .recipe_text import RecipeTable, RecipeText

SOURCES = ("source", "package", "directory", "image")
LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock")


class AgentTable(RecipeTable):
    """The table as it is written."""

    source: str | None = None
    package: str | None = None
    directory: str | None = None
    image: str | None = None
    prefix: str = "/opt/agent"
    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    workdir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class AgentReader:
    """Checks the table of one recipe; its errors name the field's line."""

    def __init__(self, table: AgentTable, text: RecipeText) -> None:
        self._table = table
        self._text = text

    def read_edits(self) -> ConfigEdits:
        table = self._table
        for name in table.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise self._error(f"env.{name}", "invalid variable name")
        return ConfigEdits(
            env=table.env,
            user=table.user,
            workdir=self._check_absolute("workdir", table.workdir),
            entrypoint=None if table.entrypoint is None else tuple(table.entrypoint),
            cmd=None if table.cmd is None else tuple(table.cmd),
            labels=table.labels,
        )

    def read_source(self) -> AgentSource | None:
        table = self._table
        given = [name for name in SOURCES if getattr(table, name)]
        if len(given) > 1:
            raise self._error(
                given[1], f"only one of {', '.join(f'`{name}`' for name in SOURCES)} may be set"
            )
        if not given:
            return None
        return AgentSource(
            source=self._check_project(self._resolve_directory("source", table.source)),
            package=table.package,
            directory=self._resolve_directory("directory", table.directory),
            image=table.image,
            prefix=self._check_prefix(table.prefix),
        )

    def _check_prefix(self, given: str) -> str:
        prefix = Path(self._check_absolute("prefix", given) or "")
        if len(prefix.parts) < 2 or ".." in prefix.parts:
            raise self._error("prefix", f"must be a directory of its own, such as `/opt/agent`: `{given}`")
        return str(prefix)

    def _check_project(self, project: str | None) -> str | None:
        """Return the project's path; raise BadInput for a project with a lock file or a uv workspace.

        Packaging resolves the dependencies anew, so the versions would differ from the locked ones.
        """
        if project is None:
            return None
        hint = "give `package` with exact versions, or `directory` with the agent installed"
        for name in LOCK_FILES:
            if (Path(project) / name).exists():
                raise self._error("source", f"lock files are not supported yet: `{project}/{name}`", hint)
        if _is_workspace(Path(project) / "pyproject.toml"):
            raise self._error("source", f"workspaces are not supported yet: `{project}`", hint)
        return project

    def _resolve_directory(self, name: str, given: str | None) -> str | None:
        if given is None:
            return None
        path = (self._text.path.parent / given).absolute()
        if not path.is_dir():
            raise self._error(name, f"no such directory: `{path}`")
        return str(path)

    def _check_absolute(self, name: str, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise self._error(name, f"must be absolute: `{path}`")
        return path

    def _error(self, name: str, what: str, hint: str = "") -> BadInput:
        return self._text.field_error(f"agent.{name}", what, hint)


def _is_workspace(pyproject: Path) -> bool:
    """Return whether a project is a uv workspace, or takes a dependency from one."""
    try:
        uv = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["uv"]
        sources = [source for source in uv.get("sources", {}).values() if isinstance(source, dict)]
        return "workspace" in uv or any(source.get("workspace") for source in sources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # packaging the project reports the error
