"""Where the directories of one process sandbox lie on this machine, and what is called how inside.

It makes nothing. Another start or another network is another layout of the same directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from ..core.errors import SandboxFailed
from ..core.records import Network, Start
from . import bubblewrap
from .places import Places


class Layout:
    """The directories below `directory`; with bubblewrap they have names of their own inside."""

    def __init__(
        self, directory: Path, start: Start, network: Network, confined: bool, show: Mapping[str, str]
    ) -> None:
        self.directory = directory
        self.start = start
        self.network = network
        self._confined = confined
        self._show = dict(show)  # of the host, also where that is replaced: path inside -> of this machine
        self.work = str(directory / "work")  # of this machine, as all directories here
        self.home = str(directory / "home")
        self.tmp = str(directory / "tmp")
        self._private = str(directory / "private")

    @property
    def private(self) -> str:
        return bubblewrap.PRIVATE if self._confined else self._private

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
        own = self.directory / "own"
        work = {self.start.workdir: self.work} if self.start.workdir else {}
        return work | {path: str(own / str(n)) for n, path in enumerate(self.start.directories)}

    @property
    def all(self) -> list[str]:
        """What has to be made."""
        return list(dict.fromkeys((self.work, self.home, self.tmp, self._private, *self.own.values())))

    @cached_property
    def places(self) -> Places:
        roots = {self.workdir: self.work, self.private: self._private, **self.own}
        return Places(self.workdir, self.view().mounts if self._confined else {}, roots)

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
        return bubblewrap.View(
            work=self.work,
            home=self.home,
            private=self._private,
            tmp=self.tmp,
            show=self._show,
            own=self.own,
            shares_network=self.network is Network.OPEN,
            gateway=str(gateway) if gateway and self.network is Network.GATEWAY else None,
            workdir=workdir,
        )


def check(start: Start, confined: bool) -> None:
    """Refuse what only a container can give."""
    unmet = [
        (not start.processes, "its own image"),
        (bool(start.user), f"the user `{start.user}`"),
        (bool(start.directories or start.workdir) and not confined, "directories of its own, or bubblewrap"),
        (start.network is Network.NONE and not confined, "no network, or bubblewrap"),
    ]
    if wanted := next((what for lacking, what in unmet if lacking), ""):
        needs = f"the instance needs a container, for {wanted}"
        raise SandboxFailed(needs, "`--sandbox docker`", kind="start", again=False)
