"""Finds tasks below a directory and computes their digests. `task_file.py` reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from ...core.errors import BadInput
from .task_file import TASK_FILE

BLOCK = 1 << 20


def find_tasks(root: Path, *, last_first: bool = False) -> Iterator[Path]:
    """Yield the directories with a `task.toml` at or below `root`, sorted; links are not followed."""
    try:
        if (root / TASK_FILE).is_file():
            yield root
            return
        with os.scandir(root) as found:
            names = [e.name for e in found if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise BadInput(f"cannot read `{root}`: {error.strerror}") from None
    for name in sorted(names, reverse=last_first):
        yield from find_tasks(root / name, last_first=last_first)


def find_common_directory(root: Path) -> Path | None:
    """Return the innermost directory that contains all tasks at or below `root`; None if there are none."""
    first, last = next(find_tasks(root), None), next(find_tasks(root, last_first=True), None)
    if first is None or last is None:
        return None
    return Path(os.path.commonpath([first, last]))


def digest(task: Path) -> str:
    """Return a digest of the task's files: names, modes, contents and links."""
    hashed = blake3()
    for directory, names, files in os.walk(task):
        names.sort()
        for name in sorted([*files, *(n for n in names if Path(directory, n).is_symlink())]):
            path = Path(directory, name)
            _add_parts(hashed, os.fsencode(path.relative_to(task)))
            if path.is_symlink():
                _add_parts(hashed, b"link", os.fsencode(path.readlink()))
            elif path.is_file():
                _add_parts(hashed, b"run" if path.stat().st_mode & 0o111 else b"file", _hash_content(path))
    return hashed.hexdigest()


def _hash_content(path: Path) -> bytes:
    hashed = blake3()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            hashed.update(block)
    return hashed.digest()


def _add_parts(hashed: blake3, *parts: bytes) -> None:
    for part in parts:
        hashed.update(len(part).to_bytes(8, "big") + part)
