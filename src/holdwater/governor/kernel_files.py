"""Reads small kernel files as text and numbers. The callers interpret them.

A missing or unreadable file yields an empty value: that is not an error, and no number is invented for it.
"""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """Return the single number in a file; None for `max` or an empty file."""
    told = read_text(path).strip()
    return int(told) if told.isdecimal() else None


def read_table(path: Path) -> dict[str, int]:
    """Return the rows of a file with a name and a number on each line: `anon 4096`, `MemTotal:  16 kB`."""
    rows = (line.split() for line in read_text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
