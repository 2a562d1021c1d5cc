"""Checks of the values in a suite's files: paths that leave a directory, and messages for invalid fields.

A suite may come from an untrusted source: it may copy its own files into a sandbox, but no other file of this
machine.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

import msgspec


class InvalidField(ValueError):
    """A field has an invalid value; without a field, the whole file is invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"field `{field}`: {problem}" if field else problem)


def leads_out(path: Path, root: Path) -> bool:
    """Return whether `path` (which need not exist) lies outside `root`; a loop of links counts as inside."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def is_inside(path: str) -> bool:
    """Return whether a path is relative and stays below its starting directory."""
    parts = PurePosixPath(path).parts
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path


def explain_error(error: Exception) -> str:
    """Return msgspec's message in our format: ``field `limits.pids`: expected int, got str``."""
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    text = str(error).removeprefix("JSON is malformed: ")
    if not isinstance(error, msgspec.ValidationError):
        return f"not valid JSON: {text}" if isinstance(error, msgspec.DecodeError) else text
    what, _, place = text.partition(" - at `$")
    path = place.rstrip("`").lstrip(".").replace("[...]", "").replace("[", ".").replace("]", "")
    if match := re.fullmatch(r"Object (?:contains )?(missing|unknown)(?: required)? field `(.*)`", what):
        field = f"{path}.{match[2]}" if path else match[2]
        return f"field `{field}`: {match[1]}"
    what = what.replace(" | null`", "`").replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"field `{path}`: {what}" if path else what
