"""The files of an attempt: what they are called, what they take up, and how they go.

Which of them go is decided by `core.policy.keeps` and written down in `retention.py` first.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from ..core.records import KeptFile, Verdict
from .directory import RunDirectory
from .exchanges import segment_path

SQUEEZED = ".zst"  # what the name of a compressed log ends with
TAKEN_OUT = ".files"  # the same of a directory of what a suite took out
PIECE = 1 << 20  # bytes of a file in memory at a time
BLOCK = 512  # bytes that `st_blocks` counts in, whatever the file system's own are


def log_path(directory: RunDirectory, attempt: int, name: str) -> Path:
    """What the agent and the suite log and print in an attempt at the instance `name`."""
    return directory.logs / f"{attempt:06d}-{slug(name)}.log"


def output_path(directory: RunDirectory, attempt: int, name: str) -> Path:
    """What the attempt's commands print."""
    return directory.logs / f"{attempt:06d}-{slug(name)}.out"


def salvage_path(directory: RunDirectory, attempt: int) -> Path:
    """The work that an attempt left."""
    return directory.artifacts / f"{attempt:06d}.tar.zst"


def patch_path(directory: RunDirectory, attempt: int) -> Path:
    """The same as a patch, where the suite asks for one."""
    return directory.artifacts / f"{attempt:06d}.patch"


def answer_path(directory: RunDirectory, attempt: int) -> Path:
    """An answer that is too long for the ledger, as JSON."""
    return directory.artifacts / f"{attempt:06d}.answer.json"


def answer_json(directory: RunDirectory, verdict: Verdict) -> str | None:
    """The answer behind a verdict, a long one from its file; None: there is none, or it is not kept."""
    if verdict.kept is None or verdict.kept.answer is None:
        return verdict.answer
    try:
        return (directory.artifacts / verdict.kept.answer.name).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def describe_file(path: Path) -> KeptFile:
    """A file of `artifacts/` as it is now. Reads it: call it in a thread."""
    with path.open("rb") as file:
        digest = blake3()
        while piece := file.read(PIECE):
            digest.update(piece)
        return KeptFile(name=path.name, bytes=file.tell(), digest=digest.hexdigest())


def check_file(path: Path, kept: KeptFile) -> str:
    """What is wrong with a file that was kept; empty: it is as it was written. Reads it."""
    try:
        found = describe_file(path)
    except OSError as error:
        return f"`{path.name}` cannot be read: {error.strerror}"
    if found.bytes != kept.bytes:
        return f"`{path.name}` has {found.bytes} bytes, {kept.bytes} were written"
    return f"`{path.name}` is not as it was written" if kept.digest not in ("", found.digest) else ""


def taken_out_path(directory: RunDirectory, attempt: int) -> Path:
    """A directory of what the suite took out of an attempt's sandbox."""
    return directory.artifacts / f"{attempt:06d}{TAKEN_OUT}"


def slug(name: str) -> str:
    """Enough of an id to recognise its files by; what is no plain character becomes `_`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:48].strip(".") or "_"


def attempt_logs(directory: RunDirectory, attempt: int, name: str) -> tuple[Path, ...]:
    """Its logs as they are written, whether they are there or not."""
    return log_path(directory, attempt, name), output_path(directory, attempt, name)


def attempt_files(directory: RunDirectory, attempt: int, name: str) -> Iterator[Path]:
    """What there is of an attempt on disk, blobs apart: many attempts may refer to one."""
    logs = attempt_logs(directory, attempt, name)
    squeezed = (path.with_name(path.name + SQUEEZED) for path in logs)
    work = (salvage_path, patch_path, answer_path, taken_out_path)
    made = (path(directory, attempt) for path in work)
    for path in (segment_path(directory, attempt), *made, *logs, *squeezed):
        if os.path.lexists(path):
            yield path


def remove(path: Path) -> int:
    """Remove a file, or what a suite took out; the bytes that frees, none if it was gone already."""
    if path.suffix == TAKEN_OUT and path.is_dir() and not path.is_symlink():
        freed = taken_below(path)
        shutil.rmtree(path)
        return freed
    freed = taken(path)
    path.unlink(missing_ok=True)
    return freed


def taken(path: Path) -> int:
    """The bytes that a file takes up on disk, none if it is gone; a link is not followed."""
    try:
        return path.lstat().st_blocks * BLOCK
    except FileNotFoundError:
        return 0


def taken_below(path: Path) -> int:
    """The bytes that a directory takes up, with all there is in it."""
    total = taken(path)
    with os.scandir(path) as entries:
        for entry in entries:
            below = entry.is_dir(follow_symlinks=False)
            total += taken_below(Path(entry.path)) if below else taken(Path(entry.path))
    return total


def is_plain(path: Path) -> bool:
    """Whether a regular file can be seen there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False
