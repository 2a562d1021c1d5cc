"""Maps paths inside a sandbox to paths on this machine.

Links are followed as a process inside would follow them. The result may change a moment later:
`confined_paths.py` opens it so that this is harmless.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

from ..core.errors import SandboxFailed
from . import confined_paths

MOST_LINKS = 40  # per path: the kernel's own limit


class PathMapping:
    """A sandbox's working directory and mounts: path inside -> path on this machine."""

    def __init__(
        self,
        workdir: str,
        mounts: Mapping[str, str],
        roots: Mapping[str, str],
        links: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.workdir = workdir
        # Readable and writable from outside: path inside -> path on this machine; inner paths first.
        self.roots = dict(sorted(roots.items(), key=lambda root: len(root[0]), reverse=True))
        self._links = links  # outside of mounts: path inside -> target
        self._mounts = [  # path inside, prefix of the paths below it, path on this machine
            (inside, f"{inside.rstrip('/')}/", mounts[inside])
            for inside in sorted(mounts, key=len, reverse=True)  # inner paths first
        ]

    def locate(self, path: str) -> tuple[str, list[str]]:
        """Return a directory of this machine and the steps to `path`, links followed.

        Raise SandboxFailed if `path` is not below one of the roots.
        """
        real = "" if "\0" in path else self._follow(path)
        for inside, root in self.roots.items():
            if real == inside or real.startswith(f"{inside}/"):
                return root, real[len(inside) + 1 :].split("/") if real != inside else []
        raise SandboxFailed(f"not below the working directory: `{path[:300]}`", kind="path", again=False)

    def check_program(self, name: str, path: str) -> str:
        """Return the path of the program `name`.

        Raise if it is missing: an exit status could also be the program's own.
        """
        if found := self.find_program(name, path):
            return found
        here = shutil.which(name, path=path)
        hint = f"sandboxes do not show `{here}`: add `--mount {os.path.dirname(here)}:DIR`" if here else ""  # noqa: PTH120
        raise SandboxFailed(f"no such program in the sandbox: `{name}`", hint, kind="missing", again=False)

    def find_program(self, name: str, path: str) -> str | None:
        """Return the link-free path of the program that a process in the working directory finds."""
        directories = [""] if "/" in name else path.split(os.pathsep)
        found = (self._find_executable(os.path.join(directory, name)) for directory in directories)  # noqa: PTH118
        return next(filter(None, found), None)

    def _find_executable(self, path: str) -> str | None:
        try:
            real = self._follow(path)
            return real if confined_paths.is_program(*self._locate_on_host(real)) else None
        except (OSError, ValueError, SandboxFailed):  # ValueError: not a valid path
            return None

    def _follow(self, path: str) -> str:
        """Return `path` without links, dots and double slashes; missing parts are kept as they are."""
        real, links = "", 0
        todo = _split_reversed(os.path.join(self.workdir, path))  # noqa: PTH118
        while todo:
            step = todo.pop()
            if step == "..":
                real = real.rpartition("/")[0]
            elif step not in ("", "."):
                target = self._read_link(f"{real}/{step}")
                if target is None:
                    real = f"{real}/{step}"
                    continue
                links += 1
                if links > MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                real = "" if target.startswith("/") else real
                todo += _split_reversed(target)
        return real

    def _read_link(self, path: str) -> str | None:
        if path in self._links:
            return self._links[path]
        try:
            return confined_paths.read_link(*self._locate_on_host(path))
        except OSError:
            return None  # not a link, or not visible

    def _locate_on_host(self, path: str) -> tuple[str, list[str]]:
        """Return a directory of this machine and the steps from it to `path`; the last step may be a link."""
        for inside, below, host in self._mounts:
            if path == inside or path.startswith(below):
                steps = path[len(inside.rstrip("/")) :].split("/")[1:]
                above, _, name = host.rpartition("/")
                return (host, steps) if steps else (above or "/", [name])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _split_reversed(path: str) -> list[str]:
    return path.split("/")[::-1]
