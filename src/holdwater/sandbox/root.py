"""Selects what the root of a process sandbox shows of this machine: the system's programs, or the whole host.

This module lists the paths. `bubblewrap.py` turns them into mounts and hides secrets in them.
"""

from __future__ import annotations

import os
import pwd
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import field

from ..core.config import SandboxRoot
from ..core.records import MiB, Record
from .confined_paths import FULL

# Programs and the files that they read: no homes, projects, state or sockets of the machine.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/nix/store", "/gnu/store"),  # where some systems keep all programs
    "/sys/devices/system",  # the number of processors
)
ETC = "/etc"
LARGEST = 16 * MiB  # bytes of a file in `/etc`
HOST = "/"
SECRETS = (".ssh", ".aws", ".config/gcloud", ".netrc", ".docker", ".kube", ".gnupg", ".git-credentials")
PACKAGE = Path(__file__).parents[1]  # holdwater itself, with the solutions of the demo


class RootMounts(Record, frozen=True):
    """The paths and links that the root shows, read-only."""

    binds: dict[str, str] = field(default_factory=lambda: {HOST: HOST})  # path inside -> path on this machine
    links: dict[str, str] = field(default_factory=dict)  # path inside -> target

    @property
    def shows_host(self) -> bool:
        return HOST in self.binds

    def locate(self, path: str) -> Path | None:
        """Return the path on this machine that the root shows at `path`, whether it exists or not."""
        for inside, host in self.binds.items():
            if is_below(path, [inside]):
                return Path(host + path[len(inside) :]) if inside != HOST else Path(path)
        return None


def make_root(kind: SandboxRoot, settings: str = ETC) -> RootMounts:
    """Return the root of this kind. `settings`: shown as `/etc`, a copy of it without its secrets."""
    if kind is SandboxRoot.HOST:
        return RootMounts()
    binds, links = {ETC: settings}, {"/var/run": "../run"}
    for path in (*SYSTEM, *_find_interpreter()):
        if Path(path).is_symlink():
            links[path] = os.readlink(path)  # noqa: PTH115 - as it stands
        elif Path(path).exists() and not is_below(path, binds):
            binds[path] = path
    return RootMounts(binds=binds, links=links)


def copy_settings(into: Path) -> None:
    """Copy the files of `/etc` that every user may read, so that they stay the same during a run. Blocks.

    Hiding the secrets by mounts would cost each command more, and a file that is replaced loses its mount.
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
                    continue  # removed meanwhile, or not readable for this user either


def _copy_setting(entry: os.DirEntry[str], target: str) -> bool:
    """Copy one entry, directories as empty ones; return whether it is a directory."""
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)  # noqa: PTH115, PTH211 - as it stands
        return False
    found = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_IXOTH:
        os.mkdir(target)  # noqa: PTH102 - as in the next function
        return True
    if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IROTH and found.st_size <= LARGEST:
        _copy_file(entry.path, target, found.st_mode & 0o755)
    return False


def _copy_file(source: str, target: str, mode: int) -> None:
    """Copy a file with few system calls: `shutil` takes twice as long, and each worker waits for the copy."""
    content = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            while os.sendfile(copy, content, None, LARGEST):
                pass
            os.fchmod(copy, mode)
        finally:
            os.close(copy)
    finally:
        os.close(content)


def find_secrets(kind: SandboxRoot) -> Iterator[Path]:
    """Yield the paths that must be hidden in every sandbox."""
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        home = None
    yield from (home / name for name in SECRETS if home is not None)
    if kind is SandboxRoot.SYSTEM:
        yield PACKAGE


def is_below(path: str, places: Iterable[str]) -> bool:
    for place in places:  # a plain loop: called hundreds of times per command
        if path == place or path.startswith(place if place.endswith("/") else place + "/"):
            return True
    return False


def _find_interpreter() -> Iterator[str]:
    """Yield the paths of the Python that runs the forwarder, without a virtual environment's packages."""
    yield os.path.realpath(Path(sys.executable).resolve().parent)
    yield os.path.realpath(Path(sys.base_prefix, "lib"))
