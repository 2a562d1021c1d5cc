"""Reads small kernel files below `/proc` and `/sys` as text and numbers. The callers interpret them.

A missing or unreadable file yields an empty value: that is not an error, and no number is invented for it.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str:
    """Read a file with as few system calls as possible: some are read five times a second."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.fsdecode(b"".join(iter(lambda: os.read(fd, 1 << 16), b"")))
    except OSError:
        return ""
    finally:
        os.close(fd)


def read_number(path: Path) -> int | None:
    """Return the single number in a file; None for `max` or an empty file."""
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None


def read_table(path: Path) -> dict[str, int]:
    """Return the rows of a file with a name and a number on each line: `anon 4096`, `MemTotal:  16 kB`."""
    rows = (line.split() for line in read_text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def read_cgroup_paths(process: Path = Path("/proc/self")) -> dict[str, str]:
    """Return controller -> path of a process's control group; version 2 has the empty name."""
    rows = [line.split(":", 2) for line in read_text(process / "cgroup").splitlines()]
    return {name: row[2] for row in rows if len(row) == 3 for name in row[1].split(",")}
