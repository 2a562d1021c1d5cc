"""Read a directory with a Dockerfile: the hash of its content, and the trace of its build.

This module only reads the directory; `image_store.py` builds it. `cache_ownership.py` explains traces.
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
from .cache_ownership import BuildTrace, parse_commands

DOCKERFILE = "Dockerfile"
LABEL = "io.holdwater.context"  # the hash of the context that an image was built from
LARGEST_DOCKERFILE = 4 * 1024 * 1024
_COPY = re.compile(r"(?:COPY|ADD)\s+(.*)", re.IGNORECASE | re.DOTALL)


class DockerfileContext(Record, frozen=True):
    """A build context: a directory with its Dockerfile and content hash."""

    directory: str
    dockerfile: str
    digest: str  # of all names, modes and contents
    size: int  # bytes of the files
    trace: BuildTrace  # without start and end times


def read_context(directory: Path) -> DockerfileContext:
    """Return the context in `directory`. Blocks: every file is read, so do not call it on an event loop."""
    try:
        with (directory / DOCKERFILE).open("rb") as file:
            text = file.read(LARGEST_DOCKERFILE).decode()
        digest, size = hashlib.sha256(), 0
        for path in _entries(directory):
            told, bytes_ = _describe_entry(path)
            digest.update(msgspec.json.encode([os.fsencode(path.relative_to(directory)), told]))
            size += bytes_
    except (OSError, UnicodeDecodeError) as error:
        message = f"`{directory}`: cannot read the build context: {error}"
        raise ImageFailed(message, kind="build", again=False) from None
    key = digest.hexdigest()[:40]
    dockerfile = f'{text}\nLABEL "{LABEL}"="{key}"\n'
    return DockerfileContext(
        directory=str(directory),
        dockerfile=dockerfile,
        digest=key,
        size=size,
        trace=_make_trace(directory, dockerfile, size),
    )


def _entries(directory: Path) -> Iterator[Path]:
    """Yield all entries of the directory tree in a stable order."""
    for entry in sorted(os.scandir(directory), key=lambda one: one.name):
        yield Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))


def _describe_entry(path: Path) -> tuple[list[object], int]:
    """Return the facts that identify the entry's content, and its size in bytes."""
    seen = path.lstat()
    if stat.S_ISLNK(seen.st_mode):
        return ["link", os.fsencode(path.readlink())], 0
    if not stat.S_ISREG(seen.st_mode):
        return [stat.filemode(seen.st_mode)], 0
    with path.open("rb") as file:
        return [stat.filemode(seen.st_mode), hashlib.file_digest(file, "sha256").hexdigest()], seen.st_size


def _make_trace(directory: Path, dockerfile: str, size: int) -> BuildTrace:
    instructions = list(_instructions(dockerfile))
    copied = [bytes_ for one in instructions if (bytes_ := _measure_copy(directory, one)) is not None]
    return BuildTrace(
        begun=0.0,
        commands=parse_commands(instructions),
        sizes=tuple(copied),
        sources=(len(dockerfile.encode()), size, sum(copied), *copied),
    )


def _instructions(text: str) -> Iterator[str]:
    """Yield the instructions of a Dockerfile, each with its continuation lines."""
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


def _measure_copy(directory: Path, instruction: str) -> int | None:
    """Return the bytes that a COPY or ADD from the context adds; None if that is unknown."""
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
