"""Paths as a sandbox sees them, and where they lie on this machine.

Links are followed as a process inside would follow them. What is found may be another thing a moment later:
`beneath.py` opens it so that this does no harm.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import SandboxFailed

MOST_LINKS = 40  # in one path: the kernel's own limit


class Places:
    """Where a sandbox works, and its mounts: for a path inside, the path of this machine that is there."""

    def __init__(self, workdir: str, mounts: Mapping[str, str], roots: Mapping[str, str]) -> None:
        self.workdir = workdir
        # What can be read and written from outside: path inside -> of this machine; inner ones first.
        self.roots = dict(sorted(roots.items(), key=lambda root: len(root[0]), reverse=True))
        self._mounts = sorted(
            mounts.items(), key=lambda mount: len(mount[0]), reverse=True
        )  # inner ones first

    def place(self, path: str) -> tuple[str, list[str]]:
        """A directory of this machine and the steps from it to `path`, links followed; none is outside."""
        real = "" if "\0" in path else self._follow(path)
        for inside, root in self.roots.items():
            if real == inside or real.startswith(f"{inside}/"):
                return root, real[len(inside) + 1 :].split("/") if real != inside else []
        raise SandboxFailed(f"not below the working directory: `{path[:300]}`", kind="path", again=False)

    def has_program(self, name: str, path: str) -> bool:
        """Whether a process in the working directory finds the program `name`, with `path` as its PATH."""
        directories = [""] if "/" in name else path.split(os.pathsep)
        return any(self._executable(os.path.join(directory, name)) for directory in directories)  # noqa: PTH118

    def _executable(self, path: str) -> bool:
        try:
            place = Path(self._on_host(self._follow(path)))
            return place.is_file() and os.access(place, os.X_OK)
        except (OSError, ValueError):  # ValueError: no path of any file
            return False

    def _follow(self, path: str) -> str:
        """`path` without links, dots and double slashes; what does not exist is taken as it is."""
        real, links = "", 0
        todo = _reversed(os.path.join(self.workdir, path))  # noqa: PTH118
        while todo:
            step = todo.pop()
            if step == "..":
                real = real.rpartition("/")[0]
            elif step not in ("", "."):
                target = self._link(f"{real}/{step}")
                if target is None:
                    real = f"{real}/{step}"
                    continue
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                real = "" if target.startswith("/") else real
                todo += _reversed(target)
        return real

    def _link(self, path: str) -> str | None:
        try:
            return os.readlink(self._on_host(path))  # noqa: PTH115
        except OSError:
            return None  # no link, or nothing that can be seen

    def _on_host(self, path: str) -> str:
        for inside, host in self._mounts:
            if path == inside or path.startswith(f"{inside}/"):
                return host + path[len(inside) :]
        return path


def _reversed(path: str) -> list[str]:
    return path.split("/")[::-1]
