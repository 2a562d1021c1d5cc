"""Finds the files of this machine that a program needs to start: its links, its package and its interpreter.

It inspects files and runs nothing. `rollout/host.py` makes sandboxes show these files.
"""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Iterable
from pathlib import Path

from msgspec import field

from ..core.records import Record

LONGEST_FIRST_LINE = 4096  # bytes of a script that are searched for its interpreter
MOST_LINKS = 40  # maximum number of links in one path, as in the kernel
PREFIX_PARTS = (
    "bin",
    "lib",
    "lib64",
    "libexec",
    "pyvenv.cfg",
)  # shown of a prefix that may hold more than programs


class ProgramFiles(Record, frozen=True):
    """Paths of this machine; a sandbox shows each at the same path."""

    trees: frozenset[str] = frozenset()  # files and directories whose paths contain no links
    links: dict[str, str] = field(default_factory=dict)  # path -> target

    def join(self, other: ProgramFiles) -> ProgramFiles:
        return ProgramFiles(trees=self.trees | other.trees, links=self.links | other.links)


def find_program_files(paths: Iterable[str], search: str) -> ProgramFiles:
    """Return the files that these programs need; `search` is the PATH for interpreters."""
    found, seen, waiting = ProgramFiles(), set[str](), list(paths)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        links, real = trace_links(path)
        if Path(real).is_dir():
            continue  # a directory may hold anything; users show it with `--mount`
        places = [Path(os.path.realpath(Path(place).parent), Path(place).name) for place in (*links, real)]
        trees = {tree for place in places for tree in _find_package(place)}
        found = found.join(ProgramFiles(trees=frozenset({real, *trees}), links=links))
        interpreter = find_interpreter(Path(real))
        at = shutil.which(interpreter, path=search) if interpreter else None
        if at is not None:
            waiting.append(str(Path(at).absolute()))
    return found


def trace_links(path: str) -> tuple[dict[str, str], str]:
    """Return every link on the way to `path` with its target, and the path without links."""
    links: dict[str, str] = {}
    real, todo = "", path.split("/")[::-1]
    while todo:
        step = todo.pop()
        if step == "..":
            real = real.rpartition("/")[0]
        elif step not in ("", "."):
            here = f"{real}/{step}"
            try:
                target = os.readlink(here)  # noqa: PTH115 - as it stands
            except OSError:
                real = here
                continue
            if len(links) >= MOST_LINKS:
                return links, here
            links[here] = target
            real = "" if target.startswith("/") else real
            todo += target.split("/")[::-1]
    return links, real or "/"


def find_interpreter(path: Path) -> str | None:
    """Return the program that a script's first line names, also after `env`; None if there is none."""
    try:
        with path.open("rb") as file:
            first = file.readline(LONGEST_FIRST_LINE)
    except OSError:
        return None  # the file is executable but not readable
    words = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if words and Path(words[0]).name == "env" and shutil.which(words[0]) is not None:
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words[0] if words else None


def _find_package(program: Path) -> list[str]:
    """Return the directories installed with a program, as far as its path shows."""
    parts = program.parts
    for name, inclusive in ((".pnpm", 0), ("node_modules", 1), ("Cellar", 0)):
        if name in parts[:-1]:
            return [str(Path(*parts[: parts.index(name) + inclusive]))]
    if program.parent.name == "shims":  # of pyenv, rbenv, asdf, mise: a shim starts programs beside it
        return [str(program.parent.parent)]
    if len(parts) > 3 and parts[1] == "opt":
        return [str(Path(*parts[:3]))]
    prefix = program.parent.parent
    if program.parent.name not in ("bin", "sbin") or prefix == Path("/"):
        return []
    marked = any((prefix / name).exists() for name in ("pyvenv.cfg", "conda-meta"))
    if marked and not _holds_more(prefix):
        return [str(prefix)]
    if marked or any(prefix.glob("lib/python3*")) or (prefix / "lib" / "node_modules").is_dir():
        return [str(prefix / name) for name in PREFIX_PARTS if (prefix / name).exists()]
    return []


def _holds_more(prefix: Path) -> bool:
    """Return whether the prefix contains the current directory or the user's home."""
    try:
        home = Path(os.path.realpath(pwd.getpwuid(os.getuid()).pw_dir))
    except KeyError:
        home = Path.cwd()
    return any(place.resolve().is_relative_to(prefix) for place in (Path.cwd(), home))
