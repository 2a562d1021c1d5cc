"""Copy the directory of a Python project, because a build may write to it. Build products stay behind."""

from __future__ import annotations

import shutil
import stat
from fnmatch import fnmatch
from pathlib import Path

from ...core.errors import BadInput
from ...ledger.pruning import is_run
from .program import CancelCheck

SKIPPED = ("__pycache__", ".git", ".hg", ".venv", "*.egg-info", ".tox", ".nox", ".*_cache")
SKIPPED_IN_A_PROJECT = ("build", "dist", "venv")


def copy_project(project: Path, into: Path, cache: Path, check: CancelCheck) -> None:
    """Copy a project without build products; links out of the project become copies of targets. Blocks."""
    project, cache = project.resolve(), cache.resolve()

    def list_skipped(directory: str, names: list[str]) -> list[str]:
        check()
        is_project = Path(directory) == project or "pyproject.toml" in names
        patterns = SKIPPED + (SKIPPED_IN_A_PROJECT if is_project else ())
        paths = [Path(directory) / name for name in names]
        return [p.name for p in paths if _is_skipped(p, patterns) or p == cache or is_run(p)]

    if not project.is_dir():
        raise BadInput(f"the agent's source is not a directory: `{project}`")
    shutil.copytree(project, into, symlinks=True, ignore=list_skipped)
    for path in sorted(into.rglob("*")):
        if path.is_symlink():
            _replace_link(path, project / path.relative_to(into), project)


def _replace_link(path: Path, original: Path, project: Path) -> None:
    """Replace a link that leads out of the project with a copy of its target."""
    target = original.resolve()
    if target.is_relative_to(project) and not original.readlink().is_absolute():
        return
    path.unlink()
    if target.is_dir() and not project.is_relative_to(target):
        shutil.copytree(target, path, symlinks=True)
    elif target.is_file():
        shutil.copy2(target, path)


def _is_skipped(path: Path, patterns: tuple[str, ...]) -> bool:
    if any(fnmatch(path.name, pattern) for pattern in patterns):
        return True
    kind = stat.S_IFMT(path.lstat().st_mode)
    # Pipes, sockets and devices are no part of a project.
    return kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
