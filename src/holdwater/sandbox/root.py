"""What of this machine the root of a process sandbox shows: the system's programs, or the whole host.

It says which paths those are. `bubblewrap.py` turns them into mounts and hides what must not be seen in them.
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import field

from ..core.config import SandboxRoot
from ..core.records import MiB, Record
from .beneath import FULL

# Programs and what they read: no home, no project, no state and no socket of the machine.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store"),  # where whole systems keep their programs
    "/sys/devices/system",  # how many processors there are
)
ETC = "/etc"
LARGEST = 16 * MiB  # of a file in `/etc`
HOST = "/"
SECRETS = (".ssh", ".aws", ".config/gcloud", ".netrc", ".docker", ".kube", ".gnupg", ".git-credentials")
PACKAGE = Path(__file__).parents[1]  # holdwater's own, with the solutions of the demo


class Root(Record, frozen=True):
    """What is shown, read-only."""

    binds: dict[str, str] = field(default_factory=lambda: {HOST: HOST})  # path inside -> of this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> where it leads

    @property
    def shows_host(self) -> bool:
        return HOST in self.binds

    def locate(self, path: str) -> Path | None:
        """The file of this machine that the root shows at `path`, be it there or not."""
        for inside, host in self.binds.items():
            if is_below(path, [inside]):
                return Path(host + path[len(inside) :]) if inside != HOST else Path(path)
        return None


def make_root(kind: SandboxRoot, settings: str = ETC) -> Root:
    """`settings`: what is shown as `/etc`, a copy of it without its secrets."""
    if kind is SandboxRoot.HOST:
        return Root()
    binds, links = {ETC: settings}, {"/var/run": "../run"}
    for path in (*SYSTEM, *_interpreter()):
        if Path(path).is_symlink():
            links[path] = os.readlink(path)  # noqa: PTH115 - as it stands
        elif Path(path).exists() and not is_below(path, binds):
            binds[path] = path
    return Root(binds=binds, links=links)


def copy_settings(into: Path) -> None:
    """Copy the files of `/etc` that every user may read: they stay the same while a run lasts. Blocks.

    Hiding its secrets by mounts would cost each command more, and a file that is replaced loses its mount.
    """
    into.mkdir()
    left = [(ETC, str(into))]  # bound: the directories of `/etc`
    while left:
        source, target = left.pop()
        with os.scandir(source) as entries:
            for entry in entries:
                try:
                    if _copy_setting(entry, place := f"{target}/{entry.name}"):
                        left.append((entry.path, place))
                except OSError as e:
                    if e.errno in FULL:
                        raise
                    continue  # it went meanwhile, or is closed to this user as well


def _copy_setting(entry: os.DirEntry[str], target: str) -> bool:
    """Whether it is a directory, which was made empty."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)  # noqa: PTH115, PTH211 - as it stands
        return False
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IXOTH:
        Path(target).mkdir()
        return True
    if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= LARGEST:
        shutil.copyfile(entry.path, target, follow_symlinks=False)
        Path(target).chmod(found.st_mode & 0o755)
    return False


def find_secrets(kind: SandboxRoot) -> Iterator[Path]:
    """What nothing in a sandbox may see, wherever it would be shown."""
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        home = None
    yield from (home / name for name in SECRETS if home is not None)
    if kind is SandboxRoot.SYSTEM:
        yield PACKAGE


def is_below(path: str, places: Iterable[str]) -> bool:
    for place in places:  # a plain loop: it is asked hundreds of times for each command
        if path == place or path.startswith(place if place.endswith("/") else place + "/"):
            return True
    return False


def _interpreter() -> Iterator[str]:
    """The Python that the way to the gateway runs on, without a virtual environment's packages."""
    yield os.path.realpath(Path(sys.executable).resolve().parent)
    yield os.path.realpath(Path(sys.base_prefix, "lib"))
