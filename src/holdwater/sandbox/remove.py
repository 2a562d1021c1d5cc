"""Removes a sandbox's directory, however deep, however locked."""

from __future__ import annotations

import errno
import shutil
import subprocess
from pathlib import Path

PATIENCE = 600.0  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT)


def remove_tree(directory: Path) -> str:
    """Remove it; what is still there, or nothing. Blocks."""
    try:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
        else:
            shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):
        return _force(directory)
    return str(directory) if directory.exists() else ""


def _force(directory: Path) -> str:
    """Directories without permission, or deeper than Python can follow; twice: a dying process may write."""
    for _ in range(2):
        _call("chmod", "-R", "u+rwX", "--", str(directory))
        _call("rm", "-rf", "--one-file-system", "--", str(directory))
        if not directory.exists():
            return ""
    return str(directory)


def _call(*argv: str) -> None:
    silent = subprocess.DEVNULL
    subprocess.run(argv, stdin=silent, stdout=silent, stderr=silent, timeout=PATIENCE, check=False)
