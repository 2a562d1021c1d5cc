"""Files and directories that this user alone can read, whatever the umask: all that a run keeps.

A run directory is 0700, so that nothing in it can be reached; the files in it are 0600 as well, for one that
is opened up later by hand.
"""

from __future__ import annotations

import os
from pathlib import Path

DIRECTORY = 0o700
FILE = 0o600


def make_directory(path: Path) -> None:
    """The directory, and those above it that are missing."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(mode=DIRECTORY, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open` and `FileIO`: a file that is made belongs to this user alone."""
    return os.open(path, flags, FILE)


def write_private(path: Path, content: bytes) -> None:
    """As `path.write_bytes`."""
    with open(path, "wb", opener=open_private) as file:
        file.write(content)
