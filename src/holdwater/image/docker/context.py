"""A directory with a Dockerfile: what is in it as a hash, and what a build of it will leave in a build cache.

Only read here; it is built in `stock.py`. What a trace is for is told in `traces.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...core.errors import ImageFailed
from ...core.records import Record
from .traces import Trace, commands_of

DOCKERFILE = "Dockerfile"
LABEL = "io.holdwater.context"  # what an image was built from, as a hash
LARGEST_DOCKERFILE = 4 * 1024 * 1024
_COPY = re.compile(r"(?:COPY|ADD)\s+(.*)", re.IGNORECASE | re.DOTALL)


class Context(Record, frozen=True):
    """What an image is built from."""

    directory: str
    dockerfile: str
    digest: str  # of every name, mode and content
    size: int  # bytes of its files
    trace: Trace  # without its time


def read(directory: Path) -> Context:
    """The context there. It reads every file, so not on an event loop."""
    try:
        with (directory / DOCKERFILE).open("rb") as file:
            text = file.read(LARGEST_DOCKERFILE).decode()
        digest, size = hashlib.sha256(), 0
        for path in _entries(directory):
            told, bytes_ = _told(path)
            digest.update(msgspec.json.encode([os.fsencode(path.relative_to(directory)), told]))
            size += bytes_
    except (OSError, UnicodeDecodeError) as error:
        message = f"`{directory}`: there is nothing to build an image from: {error}"
        raise ImageFailed(message, kind="build", again=False) from None
    key = digest.hexdigest()[:40]
    dockerfile = f'{text}\nLABEL "{LABEL}"="{key}"\n'
    return Context(
        directory=str(directory),
        dockerfile=dockerfile,
        digest=key,
        size=size,
        trace=_trace(directory, dockerfile, size),
    )


def _entries(directory: Path) -> Iterator[Path]:
    """Everything in it, in an order of its own."""
    for entry in sorted(os.scandir(directory), key=lambda one: one.name):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))


def _told(path: Path) -> tuple[list[object], int]:
    """What makes this entry another one, and the bytes that it has."""
    seen = path.lstat()
    if stat.S_ISLNK(seen.st_mode):
        return ["link", os.fsencode(path.readlink())], 0
    if not stat.S_ISREG(seen.st_mode):
        return [stat.filemode(seen.st_mode)], 0
    with path.open("rb") as file:
        return [stat.filemode(seen.st_mode), hashlib.file_digest(file, "sha256").hexdigest()], seen.st_size


def _trace(directory: Path, dockerfile: str, size: int) -> Trace:
    instructions = list(_instructions(dockerfile))
    copied = [bytes_ for one in instructions if (bytes_ := _copied(directory, one)) is not None]
    return Trace(
        begun=0.0,
        commands=commands_of(instructions),
        sizes=tuple(copied),
        sources=(len(dockerfile.encode()), size, sum(copied), *copied),
    )


def _instructions(text: str) -> Iterator[str]:
    """The instructions of a Dockerfile, each with the lines that it goes on in."""
    pending = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        pending += line
        if line.rstrip().endswith("\\"):
            pending += "\n"
            continue
        if pending.strip():
            yield pending.strip()
        pending = ""


def _copied(directory: Path, instruction: str) -> int | None:
    """Bytes that a COPY or ADD of the context's own files adds; None where that cannot be told."""
    found = _COPY.match(instruction)
    if found is None or "--from" in instruction:
        return None
    try:
        words = [word for word in shlex.split(found[1].replace("\\\n", " ")) if not word.startswith("--")]
    except ValueError:
        return None
    named = [directory / word.strip('[],"').lstrip("/") for word in words[:-1]]
    if not named or not all(path.exists() for path in named):
        return None
    files = [one for path in named for one in ([path] if path.is_file() else _entries(path))]
    return sum(one.lstat().st_size for one in files if one.is_file() or one.is_symlink())
