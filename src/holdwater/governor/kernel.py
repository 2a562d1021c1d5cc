"""The small files in which the kernel tells things, as text and numbers. What they mean: see the callers.

A file that is gone, or not ours to see, says nothing: that is no error, and no number is made up for it.
"""

from __future__ import annotations

import os
from pathlib import Path


def text(path: Path) -> str:
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""


def number(path: Path) -> int | None:
    """The one number in a file; None for `max` and for nothing."""
    told = text(path).strip()
    return int(told) if told.isdecimal() else None


def table(path: Path) -> dict[str, int]:
    """A file of names and numbers, each on a line: `anon 4096`, `MemTotal:  16 kB`."""
    rows = (line.split() for line in text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
