"""Reads an `images.toml`: which bases, which agent, where the images go and how they are made.

It looks at no registry and builds nothing. What is wrong is named by file, line and field.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import AgentSource, Edits, EngineKind, Platform, Recipe, Registry, Steps
from ..core.sizes import bytes_of
from .naming import check_template

SOURCES = ("source", "package", "directory", "image")
LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "pylock.toml", "Pipfile.lock")
INSTRUCTION = re.compile(r"[A-Za-z]+\s")
MOST_AT_ONCE = 1000


class _Table(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class _Named(_Table):
    name: str
    image: str


class _Bases(_Table):
    images: list[str | _Named] = []
    file: str | None = None
    suite: str | None = None
    template: str | None = None


class _Target(_Table):
    repository: str
    alias: str | None = None


class _Agent(_Table):
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


class _Build(_Table):
    engine: EngineKind = EngineKind.AUTO
    concurrency: int = 16
    disk: str | int | None = None
    cache: str | int = "1GiB"
    platform: str | list[str] = "linux/amd64"
    network: str = ""
    before: list[str] = []
    after: list[str] = []


class _File(_Table):
    bases: _Bases
    target: _Target
    agent: _Agent = msgspec.field(default_factory=_Agent)
    build: _Build = msgspec.field(default_factory=_Build)
    registries: dict[str, Registry] = {}


def read(path: Path) -> Recipe:
    """The recipe in `path`; BadInput names the place of what is wrong."""
    return _Reader(path).recipe()


class _Reader:
    """One file, so that messages can say where in it."""

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

    def recipe(self) -> Recipe:
        file = self._converted()
        agent, build = file.agent, file.build
        self._check_bases(file.bases)
        for field, template in (
            ("target.repository", file.target.repository),
            ("target.alias", file.target.alias),
        ):
            self._check_template(field, template)
        return Recipe(
            path=str(self._path.absolute()),
            repository=file.target.repository,
            bases=tuple(self._bases(file.bases)),
            suite=self._suite(file.bases.suite),
            template=file.bases.template,
            agent=self._source(agent),
            edits=Edits(
                env=self._env(agent.env),
                user=agent.user,
                workdir=self._absolute("agent.workdir", agent.workdir),
                entrypoint=None if agent.entrypoint is None else tuple(agent.entrypoint),
                cmd=None if agent.cmd is None else tuple(agent.cmd),
                labels=agent.labels,
            ),
            steps=Steps(before=self._steps("before", build.before), after=self._steps("after", build.after)),
            platforms=self._platforms(build.platform),
            engine=self._engine(build),
            alias=file.target.alias,
            concurrency=self._concurrency(build.concurrency),
            disk=self._size("disk", build.disk),
            cache=self._size("cache", build.cache) or 0,
            network=build.network,
            registries=file.registries,
        )

    def _converted(self) -> _File:
        try:
            return msgspec.convert(self._content, _File)
        except msgspec.ValidationError as error:
            said, _, place = str(error).partition(" - at `$")
            field = place.rstrip("`").lstrip(".")
            if unknown := re.search(r"unknown field `([^`]*)`", said):
                raise self._wrong(".".join(filter(None, (field, unknown[1]))), "no such field") from None
            raise self._wrong(field, said[0].lower() + said[1:]) from None

    def _wrong(self, field: str, what: str, hint: str = "") -> BadInput:
        line = line_of(self._text, field)
        place = f"{self._path}:{line}" if line else str(self._path)
        return BadInput(f"{place}: `{field}`: {what}" if field else f"{place}: {what}", hint)

    def _check_bases(self, bases: _Bases) -> None:
        given = [name for name in ("images", "file", "suite") if getattr(bases, name)]
        if len(given) != 1:
            raise self._wrong("bases", "needs one of `images`, `file` and `suite`")
        if bases.template is not None and not bases.suite:
            raise self._wrong("bases.template", "needs `suite`, whose instances it names")
        self._check_template("bases.template", bases.template)

    def _check_template(self, field: str, template: str | None) -> None:
        try:
            check_template(template or "")
        except ValueError as error:
            raise self._wrong(field, str(error)) from None

    def _bases(self, bases: _Bases) -> Iterator[tuple[str, str]]:
        seen: set[str] = set()  # bound: the bases of the file
        for place, name, image in self._listed(bases):
            if not image.strip() or name in seen:
                raise BadInput(
                    f"{place}: the base is {'there twice' if image.strip() else 'empty'}: `{name}`"
                )
            seen.add(name)
            yield name, image

    def _listed(self, bases: _Bases) -> Iterator[tuple[str, str, str]]:
        """Each with its place, its name and its reference."""
        for number, base in enumerate(bases.images):
            place = f"{self._path}: `bases.images[{number}]`"
            yield (place, base, base) if isinstance(base, str) else (place, base.name, base.image)
        if bases.file is None:
            return
        path = self._path.parent / bases.file
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise self._wrong("bases.file", f"cannot read `{path}`: {error}") from None
        for number, text in enumerate(lines, 1):
            words = text.split("#")[0].split()
            if len(words) > 2:
                raise BadInput(f"{path}:{number}: more than a name and a reference: `{text.strip()[:200]}`")
            if words:
                yield f"{path}:{number}", words[0], words[-1]

    def _suite(self, suite: str | None) -> str | None:
        """A suite's file is looked for beside the recipe."""
        if suite is None:
            return None
        file, colon, name = suite.partition(":")
        beside = self._path.parent / file
        return f"{beside.absolute()}{colon}{name}" if beside.is_file() else suite

    def _source(self, agent: _Agent) -> AgentSource | None:
        given = [name for name in SOURCES if getattr(agent, name)]
        if len(given) > 1:
            raise self._wrong(
                f"agent.{given[1]}", f"only one of {', '.join(f'`{name}`' for name in SOURCES)} can be"
            )
        if not given:
            return None
        prefix = self._absolute("agent.prefix", agent.prefix) or ""
        if len(Path(prefix).parts) < 2 or ".." in Path(prefix).parts:
            raise self._wrong(
                "agent.prefix", f"must be a directory of its own, such as `/opt/agent`: `{prefix}`"
            )
        return AgentSource(
            source=self._project(self._directory("source", agent.source)),
            package=agent.package,
            directory=self._directory("directory", agent.directory),
            image=agent.image,
            prefix=str(Path(prefix)),
        )

    def _project(self, project: str | None) -> str | None:
        """A Python project. Its dependencies are resolved anew, so versions that it locks would be others."""
        if project is None:
            return None
        hint = "give `package` with exact versions, or `directory` with the agent installed"
        for name in LOCKS:
            if (Path(project) / name).exists():
                raise self._wrong("agent.source", f"locks are not honoured yet: `{project}/{name}`", hint)
        if _is_workspace(Path(project) / "pyproject.toml"):
            raise self._wrong("agent.source", f"workspaces are not honoured yet: `{project}`", hint)
        return project

    def _directory(self, name: str, given: str | None) -> str | None:
        if given is None:
            return None
        path = (self._path.parent / given).absolute()
        if not path.is_dir():
            raise self._wrong(f"agent.{name}", f"no such directory: `{path}`")
        return str(path)

    def _absolute(self, field: str, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise self._wrong(field, f"must be absolute: `{path}`")
        return path

    def _env(self, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise self._wrong(f"agent.env.{name}", "no name of a variable")
        return env

    def _steps(self, name: str, lines: list[str]) -> tuple[str, ...]:
        for text in lines:
            if not INSTRUCTION.match(text) or text.split()[0].upper() == "FROM":
                raise self._wrong(
                    f"build.{name}", f"no line of a Dockerfile that can stand here: `{text[:100]}`"
                )
        return tuple(lines)

    def _platforms(self, given: str | list[str]) -> tuple[Platform, ...]:
        found = []
        for text in [given] if isinstance(given, str) else given:
            parts = text.split("/")
            if not 2 <= len(parts) <= 3 or not all(parts):
                raise self._wrong("build.platform", f"must look like `linux/amd64`: `{text}`")
            found.append(Platform(*parts))
        if not found or len(set(found)) < len(found):
            raise self._wrong("build.platform", "names no platform, or one twice")
        return tuple(found)

    def _engine(self, build: _Build) -> EngineKind:
        steps = build.before or build.after
        if build.engine is EngineKind.REGISTRY and steps:
            raise self._wrong(
                "build.engine", "a registry cannot carry out `before` and `after`", "say `docker`"
            )
        docker = build.engine is EngineKind.DOCKER or bool(steps)
        if docker and not isinstance(build.platform, str) and len(build.platform) > 1:
            raise self._wrong("build.platform", "the docker engine makes one platform at a time")
        return build.engine

    def _concurrency(self, number: int) -> int:
        if not 1 <= number <= MOST_AT_ONCE:
            raise self._wrong("build.concurrency", f"must be from 1 to {MOST_AT_ONCE}: {number}")
        return number

    def _size(self, name: str, given: str | int | None) -> int | None:
        if given is None or isinstance(given, int):
            return given
        if (found := bytes_of(given)) is None:
            raise self._wrong(f"build.{name}", f"no size: `{given}`", "for example `80GiB`")
        return found


def _is_workspace(pyproject: Path) -> bool:
    """Whether a project is a workspace of uv, or takes a dependency from one."""
    try:
        uv = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["uv"]
        sources = [source for source in uv.get("sources", {}).values() if isinstance(source, dict)]
        return "workspace" in uv or any(source.get("workspace") for source in sources)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # packaging it says what is wrong


def line_of(text: str, field: str) -> int:
    """The line in which a field of a TOML text is set, or its table begins; 0: not found."""
    *tables, key = re.sub(r"\[[^\]]*\]", "", field).split(".")
    inside, found = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[+([^\]]+)\]", line):
            inside = header[1].strip()
            found = found or (number if inside in (".".join((*tables, key)), ".".join(tables)) else 0)
        elif inside == ".".join(tables) and re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=", line):
            return number
    return found
