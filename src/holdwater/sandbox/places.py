"""Paths as a sandbox sees them, and where they lie on this machine.

Links are followed as a process inside would follow them. What is found may be another thing a moment later:
`beneath.py` opens it so that this does no harm.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

from ..core.errors import SandboxFailed
from . import beneath

MOST_LINKS = 40  # in one path: the kernel's own limit


class Places:
    """Where a sandbox works, and its mounts: for a path inside, the path of this machine that is there."""

    def __init__(
        self,
        workdir: str,
        mounts: Mapping[str, str],
        roots: Mapping[str, str],
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.workdir = workdir
        # What can be read and written from outside: path inside -> of this machine; inner ones first.
        self.roots = dict(sorted(roots.items(), key=lambda root: len(root[0]), reverse=True))
        self._links = links  # that are not in a mount: path inside -> where it leads
        self._mounts = [  # path inside, the beginning of the paths below it, path of this machine
            (inside, f"{inside.rstrip('/')}/", mounts[inside])
            for inside in sorted(mounts, key=len, reverse=True)  # inner ones first
        ]

    def place(self, path: str) -> tuple[str, list[str]]:
        """A directory of this machine and the steps from it to `path`, links followed; none is outside."""
        real = "" if "\0" in path else self._follow(path)
        for inside, root in self.roots.items():
            if real == inside or real.startswith(f"{inside}/"):
                return root, real[len(inside) + 1 :].split("/") if real != inside else []
        raise SandboxFailed(f"not below the working directory: `{path[:300]}`", kind="path", again=False)

    def check_program(self, name: str, path: str) -> str:
        """The place of the program `name`; an own error if it is missing, not a status that it could give."""
        if found := self.find_program(name, path):
            return found
        here = shutil.which(name, path=path)
        hint = f"sandboxes do not show `{here}`: add `--mount {os.path.dirname(here)}:DIR`" if here else ""  # noqa: PTH120
        raise SandboxFailed(f"no such program in the sandbox: `{name}`", hint, kind="missing", again=False)

    def find_program(self, name: str, path: str) -> str | None:
        """The path without links of the program that a process in the working directory finds on `path`."""
        directories = [""] if "/" in name else path.split(os.pathsep)
        found = (self._executable(os.path.join(directory, name)) for directory in directories)  # noqa: PTH118
        return next(filter(None, found), None)

    def _executable(self, path: str) -> str | None:
        try:
            real = self._follow(path)
            return real if beneath.is_program(*self._on_host(real)) else None
        except (OSError, ValueError, SandboxFailed):  # ValueError: no path of any file
            return None

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
        if path in self._links:
            return self._links[path]
        try:
            return beneath.read_link(*self._on_host(path))
        except OSError:
            return None  # no link, or nothing that can be seen

    def _on_host(self, path: str) -> tuple[str, list[str]]:
        """A directory of this machine and the steps from it to `path`, the last of which may be a link."""
        for inside, below, host in self._mounts:
            if path == inside or path.startswith(below):
                steps = path[len(inside.rstrip("/")) :].split("/")[1:]
                above, _, name = host.rpartition("/")
                return (host, steps) if steps else (above or "/", [name])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _reversed(path: str) -> list[str]:
    return path.split("/")[::-1]
