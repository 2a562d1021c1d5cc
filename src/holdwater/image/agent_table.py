"""The table `[agent]` of an `images.toml`: the source of the agent's files, and the images' configuration.

`layer/agent_layer.py` makes the layer.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import AgentSource, ConfigEdits, StageSource
from .docker.stages import find_unknown_argument, find_wrong_target
from .layer.package_parts import find_checkout
from .recipe_text import RecipeTable, RecipeText

SOURCES = ("source", "package", "directory", "image", "dockerfile")
NEEDED_SOURCES = {  # by the field that belongs to them
    "python": ("source", "package"),
    "extras": ("source",),
    "context": ("dockerfile",),
    "target": ("dockerfile",),
    "args": ("dockerfile",),
    "path": ("dockerfile",),
}
IMAGE_PATH = re.compile(r"[^:]\S*:/\S*")
VERSION = re.compile(r"3\.\d+(\.\d+)?")


class AgentTable(RecipeTable):
    """The table as it is written."""

    source: str | None = None
    package: str | None = None
    directory: str | None = None
    image: str | None = None
    dockerfile: str | None = None
    context: str | None = None
    target: str | None = None
    args: dict[str, str] = msgspec.field(default_factory=dict)
    path: str | None = None
    prefix: str = "/opt/agent"
    python: str | None = None
    extras: list[str] = msgspec.field(default_factory=list)
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
        for name, needs in NEEDED_SOURCES.items():
            if getattr(table, name) and not set(given) & set(needs):
                raise self._error(name, f"needs {' or '.join(f'`{need}`' for need in needs)}")
        if not given:
            return None
        source = AgentSource(
            source=self._resolve_directory("source", table.source),
            package=table.package,
            directory=self._resolve_directory("directory", table.directory),
            image=self._check_image(table.image),
            stage=self._read_stage(),
            prefix=self._check_prefix(table.prefix),
            extras=tuple(table.extras),
            python=self._check_version(table.python),
            places={name: self._text.find_place(f"agent.{name}") for name in ("source", "python")},
        )
        find_checkout(source)  # a checkout that cannot be honoured is an error of the recipe
        return source

    def _check_image(self, image: str | None) -> str | None:
        if image is not None and not IMAGE_PATH.fullmatch(image):
            hint = "for example `ghcr.io/o/tools:1:/opt/tools`"
            raise self._error("image", f"must be a reference and an absolute path: `{image}`", hint)
        return image

    def _read_stage(self) -> StageSource | None:
        table = self._table
        if table.dockerfile is None:
            return None
        file = (self._text.path.parent / table.dockerfile).absolute()
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise self._error("dockerfile", f"cannot read `{file}`: {reason}") from None
        if wrong := find_wrong_target(text, table.target or ""):
            raise self._error("target", f"`{file}`: {wrong}")
        if name := find_unknown_argument(text, table.args):
            raise self._error("args", f"`{file}`: no `ARG` declares this argument: `{name}`")
        if not table.path:
            raise self._error("dockerfile", "needs `path`, the place of the agent in the stage")
        return StageSource(
            dockerfile=str(file),
            context=self._resolve_directory("context", table.context) or str(file.parent),
            path=str(Path(self._check_absolute("path", table.path) or "")),
            target=table.target or "",
            arguments=table.args,
        )

    def _check_prefix(self, given: str) -> str:
        prefix = Path(self._check_absolute("prefix", given) or "")
        if len(prefix.parts) < 2 or ".." in prefix.parts:
            raise self._error("prefix", f"must be a directory of its own, such as `/opt/agent`: `{given}`")
        return str(prefix)

    def _check_version(self, version: str | None) -> str:
        if version is not None and not VERSION.fullmatch(version):
            raise self._error("python", f"invalid version: `{version}`", "for example `3.12`")
        return version or ""

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
