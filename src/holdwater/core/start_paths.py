"""Finds paths of a start that can lie in no sandbox. Suites, orders and sandboxes refuse them by field."""

from __future__ import annotations

from collections.abc import Iterator

from .records import Start


def find_bad_paths(start: Start) -> Iterator[tuple[str, str]]:
    """Each field of `start` with a path that no sandbox can have, and what is wrong with it."""
    if start.workdir is not None and (problem := explain_path(start.workdir)):
        yield "workdir", problem
    for path in start.directories:
        if problem := explain_path(path):
            yield "directories", problem


def explain_path(path: str) -> str:
    """Why this is no path of a directory inside a sandbox; empty: it is one."""
    if "\0" in path:
        return f"has a NUL character: {path[:200]!r}"
    if not path.startswith("/"):
        return f"must be an absolute path: `{path[:200]}`"
    if ".." in path.split("/"):
        return f"must not have `..` in it: `{path[:200]}`"
    return ""
