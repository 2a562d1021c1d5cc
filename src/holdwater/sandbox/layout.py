"""Maps the directories of one process sandbox: their paths on this machine and inside.

This module creates nothing. Another spec or another network gives another layout of the same directory.
Links are followed as a process inside would follow them. The result may change a moment later:
`confined_paths.py` opens it so that this is harmless.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from msgspec import field

from ..core.errors import SandboxFailed
from ..core.input_checks import find_bad_paths
from ..core.records import Network, Record, SandboxSpec
from . import bubblewrap, confined_paths
from .bubblewrap import RootMounts

MOST_LINKS = 40  # per path: the kernel's own limit


class SharedMounts(Record, frozen=True):
    """The paths of this machine that all sandboxes of a run show, read-only."""

    root: RootMounts
    show: dict[str, str] = field(default_factory=dict)  # path inside -> path on this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> target


class DirectoryLayout:
    """The directories below `directory`; with `shown`, for bubblewrap, they have other paths inside."""

    def __init__(
        self, directory: Path, start: SandboxSpec, network: Network, shown: SharedMounts | None
    ) -> None:
        self.directory = directory
        self.start = start
        self.network = network
        self._shown = shown
        self.work = str(directory / "work")  # on this machine, like all directories here
        self.home = str(directory / "home")
        self.tmp = str(directory / "tmp")
        self._private = str(directory / "private")

    @property
    def _confined(self) -> bool:
        return self._shown is not None

    @property
    def private(self) -> str:
        return bubblewrap.PRIVATE if self._confined else self._private

    def locate_private(self, name: str) -> tuple[str, list[str]]:
        """Return a directory that no command can replace, and the steps from it to this file of `private`."""
        return str(self.directory), [Path(self._private).name, name]

    @property
    def workdir(self) -> str:
        return self.start.workdir or bubblewrap.WORK if self._confined else self.work

    @property
    def variables(self) -> dict[str, str]:
        """The variables that name a command's own directories."""
        if self._confined:
            return {"HOME": bubblewrap.HOME, "TMPDIR": "/tmp"}
        return {"HOME": self.home, "TMPDIR": self.tmp}

    @property
    def own(self) -> dict[str, str]:
        """The instance's own directories: path inside -> path on this machine."""
        return ({self.start.workdir: self.work} if self.start.workdir else {}) | self.requested

    @property
    def requested(self) -> dict[str, str]:
        """The directories that the instance requests, without the working directory."""
        own = self.directory / "own"
        return {path: str(own / str(n)) for n, path in enumerate(self.start.directories)}

    @property
    def directories(self) -> list[str]:
        """All directories to create."""
        return list(dict.fromkeys((self.work, self.home, self.tmp, self._private, *self.own.values())))

    @property
    def beside(self) -> list[str]:
        """The directories besides the working directory and the ones that the instance requests."""
        return [self.home, self.tmp, self._private]

    @cached_property
    def path_mapping(self) -> PathMapping:
        roots = {self.workdir: self.work, self.private: self._private, **self.own}
        if self._shown is None:
            return PathMapping(self.workdir, {"/": "/"}, roots)
        view = self.make_view()
        return PathMapping(self.workdir, view.mounts, roots, {**view.root.links, **view.linked})

    def resolve_inside(self, workdir: str | None) -> str:
        """Return the directory in which a command starts, as the command sees it."""
        if workdir is None:
            return self.workdir
        root, steps = self.path_mapping.locate(workdir)
        if self._confined:
            root = next(path for path, host in self.path_mapping.roots.items() if host == root)
        return "/".join([root, *steps])

    def make_view(
        self, gateway: Path | None = None, workdir: str = bubblewrap.WORK
    ) -> bubblewrap.CommandView:
        """Return what a command in bubblewrap sees and reaches."""
        shown = self._shown or SharedMounts(RootMounts())
        return bubblewrap.CommandView(
            work=self.work,
            home=self.home,
            private=self._private,
            tmp=self.tmp,
            root=shown.root,
            show=shown.show,
            links=shown.links,
            own=self.own,
            shares_network=self.network is Network.OPEN,
            gateway=str(gateway) if gateway and self.network is Network.GATEWAY else None,
            workdir=workdir,
        )


def check_start(start: SandboxSpec, confined: bool) -> None:
    """Refuse a spec that only a container can satisfy, and invalid paths."""
    for name, problem in find_bad_paths(start):
        raise SandboxFailed(f"`{name}` {problem}", kind="start", again=False)
    for path in (start.workdir or bubblewrap.WORK, *start.directories):
        if path != bubblewrap.WORK and bubblewrap.is_reserved(path):
            raise SandboxFailed(
                f"this path is reserved in a process sandbox: `{path}`", kind="start", again=False
            )
    unmet = [
        (not start.processes, "its own image"),
        (bool(start.user), f"the user `{start.user}`"),
        (bool(start.directories or start.workdir) and not confined, "directories of its own, or bubblewrap"),
        (start.network is Network.NONE and not confined, "no network, or bubblewrap"),
    ]
    if wanted := next((what for lacking, what in unmet if lacking), ""):
        needs = f"the instance needs a container, for {wanted}"
        raise SandboxFailed(needs, "`--sandbox docker`", kind="start", again=False)


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
