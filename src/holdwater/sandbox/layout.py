"""Where the directories of one process sandbox lie on this machine, and what is called how inside.

It makes nothing. Another start or another network is another layout of the same directory.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from msgspec import field

from ..core.errors import SandboxFailed
from ..core.records import Network, Record, Start
from ..core.start_paths import find_bad_paths
from . import bubblewrap
from .places import Places
from .root import Root


class Shown(Record, frozen=True):
    """What of this machine all sandboxes of a run show, read-only."""

    root: Root
    show: dict[str, str] = field(default_factory=dict)  # path inside -> of this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> where it leads


class Layout:
    """The directories below `directory`; in bubblewrap, which `shown` is for, they have other names."""

    def __init__(self, directory: Path, start: Start, network: Network, shown: Shown | None) -> None:
        self.directory = directory
        self.start = start
        self.network = network
        self._shown = shown
        self.work = str(directory / "work")  # of this machine, as all directories here
        self.home = str(directory / "home")
        self.tmp = str(directory / "tmp")
        self._private = str(directory / "private")

    @property
    def _confined(self) -> bool:
        return self._shown is not None

    @property
    def private(self) -> str:
        return bubblewrap.PRIVATE if self._confined else self._private

    def private_place(self, name: str) -> tuple[str, list[str]]:
        """A directory that no command can replace, and the steps from it to this file of `private`."""
        return str(self.directory), [Path(self._private).name, name]

    @property
    def workdir(self) -> str:
        return self.start.workdir or bubblewrap.WORK if self._confined else self.work

    @property
    def inside(self) -> dict[str, str]:
        """Variables that say where a command finds its own."""
        if self._confined:
            return {"HOME": bubblewrap.HOME, "TMPDIR": "/tmp"}
        return {"HOME": self.home, "TMPDIR": self.tmp}

    @property
    def own(self) -> dict[str, str]:
        """The directories of its own that the instance asks for: path inside -> of this machine."""
        return ({self.start.workdir: self.work} if self.start.workdir else {}) | self.asked

    @property
    def asked(self) -> dict[str, str]:
        """The same without the working directory."""
        own = self.directory / "own"
        return {path: str(own / str(n)) for n, path in enumerate(self.start.directories)}

    @property
    def all(self) -> list[str]:
        """What has to be made."""
        return list(dict.fromkeys((self.work, self.home, self.tmp, self._private, *self.own.values())))

    @property
    def beside(self) -> list[str]:
        """What a sandbox has beside its working directory and what the instance asks for."""
        return [self.home, self.tmp, self._private]

    @cached_property
    def places(self) -> Places:
        roots = {self.workdir: self.work, self.private: self._private, **self.own}
        if self._shown is None:
            return Places(self.workdir, {"/": "/"}, roots)
        view = self.view()
        return Places(self.workdir, view.mounts, roots, {**view.root.links, **view.linked})

    def started_in(self, workdir: str | None) -> str:
        """Where a command is started, as it is called where it is started."""
        if workdir is None:
            return self.workdir
        root, steps = self.places.place(workdir)
        if self._confined:
            root = next(path for path, host in self.places.roots.items() if host == root)
        return "/".join([root, *steps])

    def view(self, gateway: Path | None = None, workdir: str = bubblewrap.WORK) -> bubblewrap.View:
        """What a command in bubblewrap sees and reaches."""
        shown = self._shown or Shown(Root())
        return bubblewrap.View(
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


def check(start: Start, confined: bool) -> None:
    """Refuse what only a container can give, and paths that lead out of it."""
    for name, problem in find_bad_paths(start):
        raise SandboxFailed(f"`{name}` {problem}", kind="start", again=False)
    for path in (start.workdir or bubblewrap.WORK, *start.directories):
        if path != bubblewrap.WORK and bubblewrap.is_kept(path):
            raise SandboxFailed(f"a process sandbox has its own: `{path}`", kind="start", again=False)
    unmet = [
        (not start.processes, "its own image"),
        (bool(start.user), f"the user `{start.user}`"),
        (bool(start.directories or start.workdir) and not confined, "directories of its own, or bubblewrap"),
        (start.network is Network.NONE and not confined, "no network, or bubblewrap"),
    ]
    if wanted := next((what for lacking, what in unmet if lacking), ""):
        needs = f"the instance needs a container, for {wanted}"
        raise SandboxFailed(needs, "`--sandbox docker`", kind="start", again=False)
