"""The directories of a process sandbox beside its working directory, as set-up left them.

They are kept when set-up is over and put back before grading: a file of the agent's in its home or in `/tmp`
would otherwise be there when its work is graded. `changes.py` writes and reads the archives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import SandboxFailed
from . import changes
from .remove import remove_tree

# Agents and their tools leave traces here that are no work: caches, settings, logs, what a daemon mounts.
TRACES = re.compile(
    r"/(tmp|run|proc|sys|dev|var/(tmp|run|log|cache)|logs/agent|(root|home/[^/]+)/\.(?!local/)[^/]+)(/|$)"
    r"|/etc/(hosts|hostname|resolv\.conf|mtab)$"
)
NO_MANIFEST = Path(os.devnull)  # nothing was there before: all of it has changed
BYTECODE = b"__pycache__"


def keep(directory: Path, places: Sequence[str]) -> dict[str, int]:
    """Write the content of `places` to archives in `directory`; return when the empty ones changed."""
    for place in places:
        changes.salvage(place, NO_MANIFEST, _archive(directory, place))
    return {
        place: Path(place).stat().st_ctime_ns for place in places if not _archive(directory, place).exists()
    }


def put_back(directory: Path, places: Sequence[str], empty: Mapping[str, int]) -> bool:
    """Make `places` anew, with what was kept of them; False: not all of it was, or one cannot be removed."""
    for place in places:
        if empty.get(place) == os.lstat(place).st_ctime_ns and not any(Path(place).iterdir()):
            continue  # nobody can set this time; on some disks it is coarse, so that it alone says too little
        if remove_tree(Path(place)):
            return False
        Path(place).mkdir()
        kept = _archive(directory, place)
        if kept.exists():
            try:
                changes.restore(place, kept)
            except SandboxFailed:
                return False
    return True


def mark(directory: Path, own: Mapping[str, str]) -> None:
    """Note what is in the directories that an instance asks for: path inside -> of this machine."""
    for place in own.values():
        changes.mark(place, _manifest(directory, place))


def count_changes(directory: Path, own: Mapping[str, str]) -> int:
    """Paths in these directories that changed since `mark`; no salvage keeps them."""
    places = [place for inside, place in own.items() if not TRACES.match(inside)]
    return sum(1 for place in places for _ in changes.compare(place, _manifest(directory, place)))


def drop_bytecode(work: str) -> None:
    """Remove compiled modules: Python runs one that says so in the place of any source, a test's too."""
    root = os.fsencode(work)
    for path in [entry.path for entry in changes.walk(root) if entry.path.split(b"/")[-1] == BYTECODE]:
        remove_tree(Path(os.fsdecode(root + b"/" + path)))


def _archive(directory: Path, place: str) -> Path:
    return directory / f"{Path(place).name}.tar.zst"


def _manifest(directory: Path, place: str) -> Path:
    return directory / f"manifest-{Path(place).name}"
