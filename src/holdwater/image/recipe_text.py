"""The text of an `images.toml`, parsed as TOML; its errors name file, line and field.

`recipe.py` and `agent_table.py` give the tables a meaning.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from ..core.errors import BadInput
from ..core.image import EngineKind

T = TypeVar("T")


class RecipeTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the TOML file."""


class RecipeText:
    """One file and its text, which error messages need to name the line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._text = path.read_text("utf-8")
            self._content = tomllib.loads(self._text)
        except OSError as error:
            hint = "`holdwater images plan --help` shows an example"
            raise BadInput(f"cannot read `{path}`: {error.strerror}", hint) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{path}: not TOML: {error}") from None

    def convert(self, table: type[T]) -> T:
        """Return the whole file as a record of this type."""
        try:
            return msgspec.convert(self._content, table)
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

    def find_place(self, field: str) -> str:
        """Return the file, and the line that sets the field."""
        line = find_line(self._text, field)
        return f"{self.path}:{line}" if line else str(self.path)

    def field_error(self, field: str, what: str, hint: str = "") -> BadInput:
        place = self.find_place(field)
        return BadInput(f"{place}: `{field}`: {what}" if field else f"{place}: {what}", hint)


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
