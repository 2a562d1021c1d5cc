"""Finds paths in a `SandboxSpec` that cannot exist in a sandbox.

Suites, orders and sandboxes refuse them by field.
"""

from __future__ import annotations

from collections.abc import Iterator

from .records import SandboxSpec


def find_bad_paths(start: SandboxSpec) -> Iterator[tuple[str, str]]:
    """Yield each field of `start` with an invalid path, and the problem."""
    if start.workdir is not None and (problem := explain_path(start.workdir)):
        yield "workdir", problem
    for path in start.directories:
        if problem := explain_path(path):
            yield "directories", problem


def explain_path(path: str) -> str:
    """Return why `path` cannot be a directory inside a sandbox; empty: it can."""
    if "\0" in path:
        return f"contains a NUL character: {path[:200]!r}"
    if not path.startswith("/"):
        return f"must be an absolute path: `{path[:200]}`"
    if ".." in path.split("/"):
        return f"must not contain `..`: `{path[:200]}`"
    return ""
