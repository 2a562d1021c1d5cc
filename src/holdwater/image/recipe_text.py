"""The text of an `images.toml`: TOML with its variables filled. Errors name file, line and field.

`recipe.py` and `agent_table.py` give the tables a meaning.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.errors import BadInput
from ..core.image import EngineKind
from .checkout import GitCheckout, read_checkout
from .layer.uv_checkout import read_uv_checkout
from .recipe_variables import RecipeVariables, fill_tables

T = TypeVar("T")


class RecipeTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""


class RecipeText:
    """One file and its text, which error messages need to name the line."""

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self.path = path
        self._environment = environment
        self._variables = RecipeVariables(environment, self._find_checkout)
        try:
            self._text = path.read_text("utf-8")
            self._content = tomllib.loads(self._text)
        except OSError as error:
            hint = "`holdwater images plan --help` shows an example"
            raise BadInput(f"cannot read `{path}`: {error.strerror}", hint) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not TOML: {error}") from None

    @property
    def revision(self) -> str:
        """The commit that the texts named; empty: none."""
        return self._variables.revision

    def convert(self, table: type[T]) -> T:
        """Return the whole file as a record of this type."""
        content = fill_tables(self._content, self._fill_field)
        try:
            return msgspec.convert(content, table)
        except msgspec.ValidationError as error:
            said, _, place = str(error).partition(" - at `$")
            field = place.rstrip("`").lstrip(".")
            if unknown := re.search(r"unknown field `([^`]*)`", said):
                raise self.field_error(".".join(filter(None, (field, unknown[1]))), "no such field") from None
            if missing := re.search(r"missing required field `([^`]*)`", said):
                raise self.field_error(".".join(filter(None, (field, missing[1]))), "missing") from None
            engines = ", ".join(f"`{engine}`" for engine in EngineKind)
            hint = f"one of {engines}" if field == "build.engine" else ""
            raise self.field_error(field, said[0].lower() + said[1:], hint) from None

    def fill_line(self, line: str, place: str) -> str:
        """Fill the variables of a line in another file; `place` begins the message of an error."""
        try:
            return self._variables.fill_text(line)
        except BadInput as error:
            raise BadInput(f"{place}: {error.message}", error.hint) from None

    def find_place(self, field: str) -> str:
        """Return the file, and the line that sets the field."""
        line = find_line(self._text, field)
        return f"{self.path}:{line}" if line else str(self.path)

    def field_error(self, field: str, what: str, hint: str = "") -> BadInput:
        place = self.find_place(field)
        return BadInput(f"{place}: `{field}`: {what}" if field else f"{place}: {what}", hint)

    def _fill_field(self, text: str, field: str) -> str:
        try:
            return self._variables.fill_text(text)
        except BadInput as error:
            raise self.field_error(field, error.message, error.hint) from None

    def _find_checkout(self) -> GitCheckout:
        """Return the checkout of the agent's files; of the recipe, if the agent has none on this machine."""
        agent = self._content.get("agent")
        for name in ("source", "directory", "context", "dockerfile"):
            given = agent.get(name) if isinstance(agent, dict) else None
            if isinstance(given, str):
                place = (self.path.parent / self._variables.fill_text(given)).resolve()
                place = place.parent if name == "dockerfile" else place
                if place.is_dir():
                    packed = _list_packed(place) if name == "source" else (place,)
                    return read_checkout(place, self._environment, packed)
        return read_checkout(self.path.parent.resolve(), self._environment, ())


def _list_packed(source: Path) -> tuple[Path, ...]:
    """Return the directories of a project that go into the agent's layer."""
    try:
        checkout = read_uv_checkout(source)
    except BadInput:
        return (source,)  # `agent_table.py` reports the error, with its field
    return checkout.directories if checkout is not None else (source,)


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
