"""Creates the files and directories of a run: readable by this user only, independent of the umask.

A run directory is 0700, so that other users reach nothing in it; its files are 0600 as well, in case the
directory's mode is relaxed later by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open` and `FileIO` that creates files readable by this user only."""
    return os.open(path, flags, FILE_MODE)


def write_private(path: Path, content: bytes) -> None:
    """Write `content` to `path` as `path.write_bytes` does, readable by this user only."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)
