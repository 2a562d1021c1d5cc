"""Render the Dockerfiles of the two build phases, and read a directory with a Dockerfile of its own.

Values with any characters arrive unchanged. `engine.py` and `image_store.py` build; `registry/manifest.py`
applies the same recipe in a registry.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from ...core.errors import ImageFailed
from ...core.image import ConfigEdits
from ...core.records import Record
from .ownership import BuildTrace, parse_commands
from .stages import find_unknown_argument, find_wrong_target, list_stages, read_instructions

ARGUMENT_PREFIX = "HOLDWATER_"
DOCKERFILE = "Dockerfile"
LABEL = "io.holdwater.context"  # the hash of the context that an image was built from
LARGEST_DOCKERFILE = 4 * 1024 * 1024
_COPY = re.compile(r"(?:COPY|ADD)\s+(.*)", re.IGNORECASE | re.DOTALL)


class RenderedDockerfile(Record, frozen=True):
    """The text of a Dockerfile, and the build arguments that it needs."""

    text: str
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


def render_base(source: str, steps: Sequence[str]) -> RenderedDockerfile:
    """Return the Dockerfile of the base phase: the recipe's `before` lines on the base, without the agent."""
    return RenderedDockerfile(text=_join_lines([f"FROM {source}", *steps]))


def render_assembly(
    source: str, layers: Iterable[str], edits: ConfigEdits, labels: dict[str, str], after: Sequence[str]
) -> RenderedDockerfile:
    """Return the assembly's Dockerfile: layers from the context, configuration, the `after` lines."""
    words = _ValueQuoter()
    lines = [f'ADD ["{name}", "/"]' for name in layers]
    lines += [f"ENV {words.quote_key(name)}={words.quote_value(value)}" for name, value in edits.env.items()]
    lines += [f"LABEL {words.quote_key(name)}={words.quote_value(value)}" for name, value in labels.items()]
    lines += [f"WORKDIR {words.quote_value(edits.workdir)}"] if edits.workdir else []
    # An argument vector is JSON, which docker does not expand. ENTRYPOINT comes first because it resets CMD.
    lines += [f"ENTRYPOINT {json.dumps(edits.entrypoint)}"] if edits.entrypoint is not None else []
    lines += [f"CMD {json.dumps(edits.cmd)}"] if edits.cmd is not None else []
    lines += after  # as the base's user
    lines += [f"USER {words.quote_value(edits.user)}"] if edits.user else []
    declared = [f"ARG {name}" for name in words.arguments]
    return RenderedDockerfile(
        text=_join_lines([f"FROM {source}", *declared, *lines]), arguments=words.arguments
    )


class _ValueQuoter:
    """Quotes values; a value with a line break, which quotes cannot hold, becomes a build argument."""

    def __init__(self) -> None:
        self.arguments: dict[str, str] = {}  # bound: the recipe's values

    def quote_key(self, name: str) -> str:
        """Return a quoted key; docker splits at the first `=` before it reads quotes."""
        return self._pass_argument(name) if "=" in name else self.quote_value(name)

    def quote_value(self, value: str) -> str:
        if "\n" in value or "\r" in value:
            return self._pass_argument(value)
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
        return f'"{escaped}"'

    def _pass_argument(self, value: str) -> str:
        name = f"{ARGUMENT_PREFIX}{len(self.arguments)}"
        self.arguments[name] = value
        return f'"${{{name}}}"'


def _join_lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


class DockerfileContext(Record, frozen=True):
    """A build context: a directory with its Dockerfile and content hash."""

    directory: str
    dockerfile: str
    digest: str  # of all names, modes and contents, the stage and the arguments
    size: int  # bytes of the files
    trace: BuildTrace  # without start and end times
    arguments: dict[str, str] = msgspec.field(default_factory=dict)


def read_context(
    directory: Path, target: str = "", arguments: dict[str, str] | None = None
) -> DockerfileContext:
    """Return the context in `directory`, for its last stage or the stage `target`.

    Blocks: every file is read, so do not call it on an event loop.
    """
    digest, size, arguments = hashlib.sha256(), 0, arguments or {}
    try:
        with (directory / DOCKERFILE).open("rb") as file:
            text = file.read(LARGEST_DOCKERFILE).decode()
        for path in _entries(directory):
            told, bytes_ = _describe_entry(path)
            digest.update(msgspec.json.encode([os.fsencode(path.relative_to(directory)), told]))
            size += bytes_
    except (OSError, UnicodeDecodeError) as error:
        message = f"`{directory}`: cannot read the build context: {error}"
        raise ImageFailed(message, kind="build", again=False) from None
    _check_request(directory, text, target, arguments)
    if target or arguments:
        digest.update(msgspec.json.encode([target, arguments], order="sorted"))
    key = digest.hexdigest()[:40]
    stage = f"FROM {target}\n" if target else ""  # a last stage, so that the label is on the image
    dockerfile = f'{text}\n{stage}LABEL "{LABEL}"="{key}"\n'
    return DockerfileContext(
        directory=str(directory),
        dockerfile=dockerfile,
        digest=key,
        size=size,
        trace=_make_trace(directory, dockerfile, size),
        arguments=arguments,
    )


def read_stage(context: Path, text: str, target: str, path: str) -> DockerfileContext:
    """Return a context whose build has the file or the content of the directory `path` of a stage. Blocks."""
    stage = target or str(len(list_stages(text)) - 1)
    last = "\n".join([text, "FROM scratch", f"COPY --from={stage} {json.dumps([path, '/'])}", ""])
    size = measure_files(context)
    return DockerfileContext(
        directory=str(context), dockerfile=last, digest="", size=size, trace=_make_trace(context, last, size)
    )


def _check_request(directory: Path, text: str, target: str, arguments: dict[str, str]) -> None:
    wrong = find_wrong_target(text, target)
    if not wrong and (name := find_unknown_argument(text, arguments)):
        wrong = f"no `ARG` declares this argument: `{name}`"
    if wrong:
        raise ImageFailed(f"`{directory / DOCKERFILE}`: {wrong}", kind="build", again=False)


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
    instructions = list(read_instructions(dockerfile))
    copied = [files for one in instructions if (files := _find_copied(directory, one))]
    sent = [sum(map(_measure_source, files)) for files in copied]
    unpacked = [sum(map(_measure_unpacked, files)) for files in copied]
    return BuildTrace(
        begun=0.0,
        commands=parse_commands(instructions),
        sizes=tuple(dict.fromkeys((*sent, *unpacked))),
        sources=(len(dockerfile.encode()), size, sum(sent), *sent),
    )


def _find_copied(directory: Path, instruction: str) -> list[Path]:
    """Return the files and directories of the context that a COPY or ADD names; none if that is unknown."""
    found = _COPY.match(instruction)
    if found is None or "--from" in instruction:
        return []
    try:
        words = [word for word in shlex.split(found[1].replace("\\\n", " ")) if not word.startswith("--")]
    except ValueError:
        return []
    named = [directory / word.strip('[],"').lstrip("/") for word in words[:-1]]
    return named if all(path.exists() for path in named) else []


def _measure_source(path: Path) -> int:
    return path.lstat().st_size if path.is_file() else measure_files(path)


def _measure_unpacked(path: Path) -> int:
    """Return the bytes that a source becomes if it is unpacked, as ADD unpacks archives."""
    if not path.is_file() or not tarfile.is_tarfile(path):
        return _measure_source(path)
    try:
        with tarfile.open(path) as archive:
            return sum(len(member.linkname) if member.issym() else member.size for member in archive)
    except (tarfile.TarError, EOFError, OSError):  # damaged: the build fails too
        return path.lstat().st_size


def measure_files(directory: Path) -> int:
    """Return the bytes of all files and links below a directory, as a daemon counts them."""
    return sum(path.lstat().st_size for path in _entries(directory) if path.is_file() or path.is_symlink())
