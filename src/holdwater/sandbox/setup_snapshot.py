"""Saves and restores the directories of a process sandbox other than its working directory.

They are saved when set-up is over and restored before grading: otherwise an agent's files in its home or in
`/tmp` would be present during grading. `changes.py` writes and reads the archives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..core.errors import SandboxFailed
from . import changes
from .tree_removal import remove_tree

# Agents and their tools leave traces here that are not work: caches, settings, logs, mounts of a daemon.
TRACES = re.compile(
    r"/(tmp|run|proc|sys|dev|var/(tmp|run|log|cache)|logs/agent|(root|home/[^/]+)/\.(?!local/)[^/]+)(/|$)"
    r"|/etc/(hosts|hostname|resolv\.conf|mtab)$"
)
NO_MANIFEST = Path(os.devnull)  # no earlier state: everything counts as changed
BYTECODE = b"__pycache__"


def save(directory: Path, places: Sequence[str]) -> None:
    """Write the content of `places` to archives in `directory`; empty ones get none."""
    for place in places:
        changes.salvage(place, NO_MANIFEST, _archive_path(directory, place))


def find_empty(directory: Path, places: Sequence[str]) -> dict[str, int]:
    """Return the ctimes of the places without an archive, which were empty when the others were saved."""
    return {
        place: Path(place).stat().st_ctime_ns
        for place in places
        if not _archive_path(directory, place).exists()
    }


def restore(directory: Path, places: Sequence[str], empty: Mapping[str, int]) -> bool:
    """Recreate `places` with their saved content; return False if that is incomplete or a removal fails."""
    for place in places:
        if empty.get(place) == os.lstat(place).st_ctime_ns and not any(Path(place).iterdir()):
            continue  # no program can set ctime; on some disks it is coarse and alone not sufficient
        if remove_tree(Path(place)):
            return False
        Path(place).mkdir()
        kept = _archive_path(directory, place)
        if kept.exists():
            try:
                changes.restore(place, kept)
            except SandboxFailed:
                return False
    return True


def write_manifests(directory: Path, own: Mapping[str, str]) -> None:
    """Record the content of the directories that an instance requests (path inside -> path on the host)."""
    for place in own.values():
        changes.write_manifest(place, _manifest_path(directory, place))


def count_changes(directory: Path, own: Mapping[str, str]) -> int:
    """Return how many paths in these directories changed since `write_manifests`; no salvage keeps them."""
    places = [place for inside, place in own.items() if not TRACES.match(inside)]
    return sum(1 for place in places for _ in changes.compare(place, _manifest_path(directory, place)))


def drop_bytecode(work: str) -> None:
    """Remove compiled modules: Python can run one in place of any source, even of a test's."""
    root = os.fsencode(work)
    for path in [entry.path for entry in changes.walk(root) if entry.path.split(b"/")[-1] == BYTECODE]:
        remove_tree(Path(os.fsdecode(root + b"/" + path)))


def _archive_path(directory: Path, place: str) -> Path:
    return directory / f"{Path(place).name}.tar.zst"


def _manifest_path(directory: Path, place: str) -> Path:
    return directory / f"manifest-{Path(place).name}"
