"""Maps the directories of one process sandbox: their paths on this machine and inside.

This module creates nothing. Another spec or another network gives another layout of the same directory.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from msgspec import field

from ..core.errors import SandboxFailed
from ..core.input_checks import find_bad_paths
from ..core.records import Network, Record, SandboxSpec
from . import bubblewrap
from .path_mapping import PathMapping
from .root import RootMounts


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
