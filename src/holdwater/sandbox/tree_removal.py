"""Removes a sandbox's directory, however deep or locked it is; follows no link in it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from .confined_paths import LIST, change_mode, discard_file

DEEPEST = 32  # directories open at once


def remove_tree(directory: Path) -> str:
    """Remove the tree; return the path if it is still there, else an empty string. Blocks."""
    for _ in range(2):  # a dying process may still write
        try:
            if directory.is_symlink() or directory.is_file():
                directory.unlink()
            else:
                _empty(directory)
                directory.rmdir()
        except FileNotFoundError:
            return ""
        except OSError:
            continue
        return ""
    return str(directory)


def _empty(directory: Path) -> None:
    """Remove all entries; directories that are too deep are moved to the top first."""
    above = os.open(directory.parent, LIST)
    try:
        top = _open_unlocked(directory.name, above)
    finally:
        os.close(above)
    stuck: set[str] = set()  # bound: entries that cannot be removed; a handful
    try:
        while found := [entry for entry in _list_entries(top) if entry[0] not in stuck]:
            for name, is_directory in found:
                try:
                    _remove(name, is_directory, top, top, 0)
                except OSError:
                    stuck.add(name)
    finally:
        os.close(top)


def _list_entries(directory: int) -> list[tuple[str, bool]]:
    """Return the names in an open directory, each with whether it is a directory."""
    with os.scandir(directory) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _remove(name: str, is_directory: bool, parent: int, top: int, depth: int) -> None:
    if not is_directory:
        discard_file(name, parent)
        return
    fd = _open_unlocked(name, parent)
    try:
        if depth >= DEEPEST:
            os.rename(name, f".{secrets.token_hex(8)}", src_dir_fd=parent, dst_dir_fd=top)
            return
        for inner, also_directory in _list_entries(fd):
            _remove(inner, also_directory, fd, top, depth + 1)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def _open_unlocked(name: str, parent: int) -> int:
    """Open a directory so that its entries can be listed and removed."""
    try:
        fd = os.open(name, LIST, dir_fd=parent)
    except PermissionError:
        change_mode(name, parent, 0o700)
        fd = os.open(name, LIST, dir_fd=parent)
    if os.fstat(fd).st_mode & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd
