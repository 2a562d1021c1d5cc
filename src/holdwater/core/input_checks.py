"""Finds problems in values from users: base URLs of model servers, and paths inside a sandbox.

Suites, orders, sandboxes and the command line refuse such values by field. A URL is stored in files, so it
must not contain a secret.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from .records import SandboxSpec


def find_url_problem(url: str) -> str:
    """Return the problem with a base URL, without quoting the URL; empty: there is none."""
    try:
        found = urlsplit(url)
        usable = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        return "must be an `http` or `https` URL"
    if "@" in found.netloc:
        return "must not contain credentials: they would be stored in the run's files"
    if "?" in url or "#" in url:
        return "must not contain `?` or `#`: request paths are appended to it"
    return ""


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
