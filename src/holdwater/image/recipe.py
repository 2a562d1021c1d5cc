"""Read an `images.toml`: which bases, which agent, where the images go and how they are made.

This module contacts no registry and builds nothing. Its errors name the file, the line and the field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import (
    AgentSource,
    BuildSteps,
    ConfigEdits,
    EngineKind,
    ImagePlatform,
    ImageRecipe,
    RegistryOptions,
)
from ..core.limits import parse_size
from .naming import check_template

SOURCES = ("source", "package", "directory", "image")
LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock")
INSTRUCTION = re.compile(r"[A-Za-z]+\s")
MOST_CONCURRENT = 1000


class _RecipeTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""


class _NamedBase(_RecipeTable):
    name: str
    image: str


class _BasesTable(_RecipeTable):
    images: list[str | _NamedBase] = []
    file: str | None = None
    suite: str | None = None
    template: str | None = None


class _TargetTable(_RecipeTable):
    repository: str
    alias: str | None = None


class _AgentTable(_RecipeTable):
    source: str | None = None
    package: str | None = None
    directory: str | None = None
    image: str | None = None
    prefix: str = "/opt/agent"
    env: dict[str, str] = {}
    user: str | None = None
    workdir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] = {}


class _BuildTable(_RecipeTable):
    engine: EngineKind = EngineKind.AUTO
    concurrency: int = 16
    disk: str | int | None = None
    cache: str | int = "1GiB"
    platform: str | list[str] = "linux/amd64"
    network: str = ""
    before: list[str] = []
    after: list[str] = []


class _RecipeFile(_RecipeTable):
    bases: _BasesTable
    target: _TargetTable
    agent: _AgentTable = msgspec.field(default_factory=_AgentTable)
    build: _BuildTable = msgspec.field(default_factory=_BuildTable)
    registries: dict[str, RegistryOptions] = {}


def read_recipe(path: Path) -> ImageRecipe:
    """Return the recipe in `path`; raise BadInput with the location of an error."""
    return _RecipeReader(path).make_recipe()


class _RecipeReader:
    """Reads one file and keeps its text, so that error messages can name the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._text = path.read_text("utf-8")
            self._content = tomllib.loads(self._text)
        except OSError as error:
            hint = "`holdwater images plan --help` shows an example"
            raise BadInput(f"cannot read `{path}`: {error.strerror}", hint) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not TOML: {error}") from None

    def make_recipe(self) -> ImageRecipe:
        file = self._convert()
        agent, build = file.agent, file.build
        self._check_bases(file.bases)
        self._check_template("target.repository", file.target.repository)
        self._check_template("target.alias", file.target.alias)
        return ImageRecipe(
            path=str(self._path.absolute()),
            repository=file.target.repository,
            bases=tuple(self._read_bases(file.bases)),
            suite=self._resolve_suite(file.bases.suite),
            template=file.bases.template,
            agent=self._read_source(agent),
            edits=ConfigEdits(
                env=self._check_env(agent.env),
                user=agent.user,
                workdir=self._check_absolute("agent.workdir", agent.workdir),
                entrypoint=None if agent.entrypoint is None else tuple(agent.entrypoint),
                cmd=None if agent.cmd is None else tuple(agent.cmd),
                labels=agent.labels,
            ),
            steps=BuildSteps(
                before=self._check_steps("before", build.before),
                after=self._check_steps("after", build.after),
            ),
            platforms=self._parse_platforms(build.platform),
            engine=self._check_engine(build),
            alias=file.target.alias,
            concurrency=self._check_concurrency(build.concurrency),
            disk=self._parse_size("disk", build.disk),
            cache=self._parse_size("cache", build.cache) or 0,
            network=build.network,
            registries=file.registries,
        )

    def _convert(self) -> _RecipeFile:
        try:
            return msgspec.convert(self._content, _RecipeFile)
        except msgspec.ValidationError as error:
            said, _, place = str(error).partition(" - at `$")
            field = place.rstrip("`").lstrip(".")
            if unknown := re.search(r"unknown field `([^`]*)`", said):
                raise self._field_error(
                    ".".join(filter(None, (field, unknown[1]))), "no such field"
                ) from None
            if missing := re.search(r"missing required field `([^`]*)`", said):
                raise self._field_error(".".join(filter(None, (field, missing[1]))), "missing") from None
            hint = (
                f"one of {', '.join(f'`{engine}`' for engine in EngineKind)}"
                if field == "build.engine"
                else ""
            )
            raise self._field_error(field, said[0].lower() + said[1:], hint) from None

    def _field_error(self, field: str, what: str, hint: str = "") -> BadInput:
        line = find_line(self._text, field)
        place = f"{self._path}:{line}" if line else str(self._path)
        return BadInput(f"{place}: `{field}`: {what}" if field else f"{place}: {what}", hint)

    def _check_bases(self, bases: _BasesTable) -> None:
        given = [name for name in ("images", "file", "suite") if getattr(bases, name)]
        if len(given) != 1:
            raise self._field_error("bases", "needs one of `images`, `file` and `suite`")
        if bases.template is not None and not bases.suite:
            raise self._field_error("bases.template", "needs `suite`, whose instances it names")
        self._check_template("bases.template", bases.template)

    def _check_template(self, field: str, template: str | None) -> None:
        try:
            check_template(template or "")
        except ValueError as error:
            raise self._field_error(field, str(error)) from None

    def _read_bases(self, bases: _BasesTable) -> Iterator[tuple[str, str]]:
        seen: set[str] = set()  # bound: the bases of the file
        for place, name, image in self._list_bases(bases):
            if not image.strip() or name in seen:
                raise BadInput(f"{place}: {'duplicate base' if image.strip() else 'empty base'}: `{name}`")
            seen.add(name)
            yield name, image

    def _list_bases(self, bases: _BasesTable) -> Iterator[tuple[str, str, str]]:
        """Yield the location in the file, the name and the reference of each base."""
        for number, base in enumerate(bases.images):
            place = f"{self._path}: `bases.images[{number}]`"
            yield (place, base, base) if isinstance(base, str) else (place, base.name, base.image)
        if bases.file is None:
            return
        path = self._path.parent / bases.file
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise self._field_error("bases.file", f"cannot read `{path}`: {reason}") from None
        for number, text in enumerate(lines, 1):
            words = text.split("#")[0].split()
            if len(words) > 2:
                raise BadInput(
                    f"{path}:{number}: expected at most a name and a reference: `{text.strip()[:200]}`"
                )
            if words:
                yield f"{path}:{number}", words[0], words[-1]

    def _resolve_suite(self, suite: str | None) -> str | None:
        """Return the suite; a suite file beside the recipe gets its absolute path."""
        if suite is None:
            return None
        file, colon, name = suite.partition(":")
        beside = self._path.parent / file
        return f"{beside.absolute()}{colon}{name}" if beside.is_file() else suite

    def _read_source(self, agent: _AgentTable) -> AgentSource | None:
        given = [name for name in SOURCES if getattr(agent, name)]
        if len(given) > 1:
            raise self._field_error(
                f"agent.{given[1]}", f"only one of {', '.join(f'`{name}`' for name in SOURCES)} may be set"
            )
        if not given:
            return None
        prefix = self._check_absolute("agent.prefix", agent.prefix) or ""
        if len(Path(prefix).parts) < 2 or ".." in Path(prefix).parts:
            raise self._field_error(
                "agent.prefix", f"must be a directory of its own, such as `/opt/agent`: `{prefix}`"
            )
        return AgentSource(
            source=self._check_project(self._resolve_directory("source", agent.source)),
            package=agent.package,
            directory=self._resolve_directory("directory", agent.directory),
            image=agent.image,
            prefix=str(Path(prefix)),
        )

    def _check_project(self, project: str | None) -> str | None:
        """Return the project's path; raise BadInput for a project with a lock file or a uv workspace.

        Packaging resolves the dependencies anew, so the versions would differ from the locked ones.
        """
        if project is None:
            return None
        hint = "give `package` with exact versions, or `directory` with the agent installed"
        for name in LOCK_FILES:
            if (Path(project) / name).exists():
                raise self._field_error(
                    "agent.source", f"lock files are not supported yet: `{project}/{name}`", hint
                )
        if _is_workspace(Path(project) / "pyproject.toml"):
            raise self._field_error("agent.source", f"workspaces are not supported yet: `{project}`", hint)
        return project

    def _resolve_directory(self, name: str, given: str | None) -> str | None:
        if given is None:
            return None
        path = (self._path.parent / given).absolute()
        if not path.is_dir():
            raise self._field_error(f"agent.{name}", f"no such directory: `{path}`")
        return str(path)

    def _check_absolute(self, field: str, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise self._field_error(field, f"must be absolute: `{path}`")
        return path

    def _check_env(self, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise self._field_error(f"agent.env.{name}", "invalid variable name")
        return env

    def _check_steps(self, name: str, lines: list[str]) -> tuple[str, ...]:
        for text in lines:
            if not INSTRUCTION.match(text) or text.split()[0].upper() == "FROM":
                raise self._field_error(
                    f"build.{name}", f"not a Dockerfile instruction that is allowed here: `{text[:100]}`"
                )
        return tuple(lines)

    def _parse_platforms(self, given: str | list[str]) -> tuple[ImagePlatform, ...]:
        found = []
        for text in [given] if isinstance(given, str) else given:
            parts = text.split("/")
            if not 2 <= len(parts) <= 3 or not all(parts):
                raise self._field_error("build.platform", f"must look like `linux/amd64`: `{text}`")
            found.append(ImagePlatform(*parts))
        if not found or len(set(found)) < len(found):
            raise self._field_error("build.platform", "no platform, or a duplicate platform")
        return tuple(found)

    def _check_engine(self, build: _BuildTable) -> EngineKind:
        steps = build.before or build.after
        if build.engine is EngineKind.REGISTRY and steps:
            raise self._field_error(
                "build.engine", "the registry engine cannot run `before` and `after`", "use `docker`"
            )
        docker = build.engine is EngineKind.DOCKER or bool(steps)
        if docker and not isinstance(build.platform, str) and len(build.platform) > 1:
            raise self._field_error("build.platform", "the docker engine builds for one platform at a time")
        return build.engine

    def _check_concurrency(self, number: int) -> int:
        if not 1 <= number <= MOST_CONCURRENT:
            raise self._field_error("build.concurrency", f"must be from 1 to {MOST_CONCURRENT}: {number}")
        return number

    def _parse_size(self, name: str, given: str | int | None) -> int | None:
        if given is None or isinstance(given, int):
            return given
        if (found := parse_size(given)) is None:
            raise self._field_error(f"build.{name}", f"invalid size: `{given}`", "for example `80GiB`")
        return found


def _is_workspace(pyproject: Path) -> bool:
    """Return whether a project is a uv workspace, or takes a dependency from one."""
    try:
        uv = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["uv"]
        sources = [source for source in uv.get("sources", {}).values() if isinstance(source, dict)]
        return "workspace" in uv or any(source.get("workspace") for source in sources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # packaging the project reports the error


def find_line(text: str, field: str) -> int:
    """Return the line that sets a field of a TOML text, or that begins its table; 0: not found."""
    *tables, key = re.sub(r"\[[^\]]*\]", "", field).split(".")
    inside, found = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            inside = header[1].strip()
            found = found or (number if inside in (".".join((*tables, key)), ".".join(tables)) else 0)
        elif inside == ".".join(tables) and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return found
