"""Read an `images.toml`: which bases, which agent, where the images go and how they are made.

This module contacts no registry and builds nothing. Its errors name the file, the line and the field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from ..core.errors import BadInput
from ..core.image import (
    BuildSteps,
    EngineKind,
    ImagePlatform,
    ImageRecipe,
    RegistryOptions,
)
from ..core.limits import parse_size
from .agent_table import AgentReader, AgentTable
from .naming import check_template, is_shared
from .recipe_text import RecipeTable, RecipeText

INSTRUCTION = re.compile(r"[A-Za-z]+\s")
MOST_CONCURRENT = 1000


class _NamedBase(RecipeTable):
    name: str
    image: str


class _BasesTable(RecipeTable):
    images: list[str | _NamedBase] = msgspec.field(default_factory=list)
    file: str | None = None
    suite: str | None = None
    template: str | None = None


class _TargetTable(RecipeTable):
    repository: str
    alias: str | list[str] = msgspec.field(default_factory=list)
    bases: str | None = None


class _BuildTable(RecipeTable):
    engine: EngineKind = EngineKind.AUTO
    concurrency: int = 16
    disk: str | int | None = None
    cache: str | int | None = None
    keep: bool = False
    platform: str | list[str] = "linux/amd64"
    network: str = ""
    before: list[str] = msgspec.field(default_factory=list)
    after: list[str] = msgspec.field(default_factory=list)


class _RecipeFile(RecipeTable):
    bases: _BasesTable
    target: _TargetTable
    agent: AgentTable = msgspec.field(default_factory=AgentTable)
    build: _BuildTable = msgspec.field(default_factory=_BuildTable)
    registries: dict[str, RegistryOptions] = msgspec.field(default_factory=dict)


def read_recipe(path: Path, variables: Mapping[str, str] | None = None) -> ImageRecipe:
    """Return the recipe in `path` with its variables filled; raise BadInput with the location of an error."""
    return _RecipeReader(path, variables or {}).make_recipe()


class _RecipeReader:
    """Checks the tables of one file."""

    def __init__(self, path: Path, variables: Mapping[str, str]) -> None:
        self._path = path
        self._text = RecipeText(path, variables)

    def make_recipe(self) -> ImageRecipe:
        file = self._text.convert(_RecipeFile)
        agent, build = AgentReader(file.agent, self._text), file.build
        self._check_bases(file.bases)
        self._check_template("target.repository", file.target.repository)
        bases = tuple(self._read_bases(file.bases))
        return ImageRecipe(
            path=str(self._path.absolute()),
            repository=file.target.repository,
            revision=self._text.revision,
            bases=bases,
            suite=self._resolve_suite(file.bases.suite),
            template=file.bases.template,
            agent=agent.read_source(),
            edits=agent.read_edits(),
            steps=BuildSteps(
                before=self._check_steps("before", build.before),
                after=self._check_steps("after", build.after),
            ),
            base_repository=self._check_base_repository(file),
            platforms=self._parse_platforms(build.platform),
            engine=self._check_engine(file),
            aliases=self._check_aliases(file.target, several=len(bases) != 1),
            concurrency=self._check_concurrency(build.concurrency),
            disk=self._parse_size("disk", build.disk),
            cache=self._parse_size("cache", build.cache),
            keep=build.keep,
            network=build.network,
            registries=file.registries,
        )

    def _check_bases(self, bases: _BasesTable) -> None:
        given = [name for name in ("images", "file", "suite") if getattr(bases, name)]
        if len(given) != 1:
            raise self._text.field_error("bases", "needs one of `images`, `file` and `suite`")
        if bases.template is not None and not bases.suite:
            raise self._text.field_error("bases.template", "needs `suite`, whose instances it names")
        self._check_template("bases.template", bases.template)

    def _check_template(self, field: str, template: str | None) -> None:
        try:
            check_template(template or "")
        except ValueError as error:
            raise self._text.field_error(field, str(error)) from None

    def _check_aliases(self, target: _TargetTable, *, several: bool) -> tuple[str, ...]:
        """Return the templates of the aliases; refuse one that several images of the recipe would share."""
        aliases = [target.alias] if isinstance(target.alias, str) else target.alias
        for alias in aliases:
            self._check_template("target.alias", alias)
            if several and is_shared(target.repository) and is_shared(alias):
                raise self._text.field_error(
                    "target.alias", f"every image would get this tag: `{alias}`", "add `{id}` to it"
                )
        return tuple(dict.fromkeys(aliases))

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
            raise self._text.field_error("bases.file", f"cannot read `{path}`: {reason}") from None
        for number, text in enumerate(lines, 1):
            words = self._text.fill_line(text.split("#")[0], f"{path}:{number}").split()
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

    def _check_steps(self, name: str, lines: list[str]) -> tuple[str, ...]:
        for text in lines:
            if not INSTRUCTION.match(text) or text.split()[0].upper() == "FROM":
                raise self._text.field_error(
                    f"build.{name}", f"not a Dockerfile instruction that is allowed here: `{text[:100]}`"
                )
        return tuple(lines)

    def _parse_platforms(self, given: str | list[str]) -> tuple[ImagePlatform, ...]:
        found = []
        for text in [given] if isinstance(given, str) else given:
            parts = text.split("/")
            if not 2 <= len(parts) <= 3 or not all(parts):
                raise self._text.field_error("build.platform", f"must look like `linux/amd64`: `{text}`")
            found.append(ImagePlatform(*parts))
        if not found or len(set(found)) < len(found):
            raise self._text.field_error("build.platform", "no platform, or a duplicate platform")
        return tuple(found)

    def _check_base_repository(self, file: _RecipeFile) -> str | None:
        bases = file.target.bases
        if bases and not file.build.before:
            raise self._text.field_error("target.bases", "needs `build.before`, which is run on the bases")
        if bases == file.target.repository:
            raise self._text.field_error("target.bases", f"must differ from `target.repository`: `{bases}`")
        self._check_template("target.bases", bases)
        return bases

    def _check_engine(self, file: _RecipeFile) -> EngineKind:
        build = file.build
        steps = build.before or build.after
        if build.engine is EngineKind.REGISTRY and steps and (build.after or not file.target.bases):
            raise self._text.field_error(
                "build.engine", "the registry engine cannot run `before` and `after`", "use `docker`"
            )
        docker = build.engine is EngineKind.DOCKER or bool(steps)
        if docker and not isinstance(build.platform, str) and len(build.platform) > 1:
            raise self._text.field_error(
                "build.platform", "the docker engine builds for one platform at a time"
            )
        return build.engine

    def _check_concurrency(self, number: int) -> int:
        if not 1 <= number <= MOST_CONCURRENT:
            raise self._text.field_error(
                "build.concurrency", f"must be from 1 to {MOST_CONCURRENT}: {number}"
            )
        return number

    def _parse_size(self, name: str, given: str | int | None) -> int | None:
        if given is None or isinstance(given, int):
            return given
        if (found := parse_size(given)) is None:
            raise self._text.field_error(f"build.{name}", f"invalid size: `{given}`", "for example `80GiB`")
        return found
