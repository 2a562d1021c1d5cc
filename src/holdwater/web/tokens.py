"""The token of a server: the server makes it at its start, clients of the same user find it by the address.

The token lies in the server's run directory, with mode 0600. A link to it, named by the address, lies in each
directory where clients look. The rules that ask for it are in `visitors.py`.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import pwd
import secrets
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

UNIX = "unix:"
CACHE = "HOLDWATER_CACHE"
LONGEST = 4096  # bytes of a file that holds a token
LOOPBACK = ("127.0.0.1", "[::1]")  # what `localhost` stands for


def link_directories(env: Mapping[str, str]) -> list[Path]:
    """Where links to tokens lie: the user's runtime directory, and a directory that outlives a logout.

    The latter may lie in a home that several machines share, so that each machine has its own.
    """
    found = [find_cache(env) / "servers" / socket.gethostname()]
    if (runtime := env.get("XDG_RUNTIME_DIR")) and _is_private(Path(runtime)):
        found.insert(0, Path(runtime, "holdwater"))
    return found


def find_cache(env: Mapping[str, str]) -> Path:
    """The user's cache directory for holdwater, the same with and without `HOME`: a service may have none."""
    if said := env.get(CACHE):
        return Path(said).absolute()
    if said := env.get("XDG_CACHE_HOME"):
        return Path(said, "holdwater")
    try:
        return Path(env.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir, ".cache", "holdwater")
    except KeyError:  # the user has no entry, and so no home
        return Path(tempfile.gettempdir(), f"holdwater-{os.getuid()}")


@contextmanager
def written_token(file: Path) -> Iterator[str]:
    """A new token, in `file` while the block lasts."""
    token = secrets.token_urlsafe(32)
    new = file.with_name(file.name + ".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as writing:
        os.fchmod(writing.fileno(), 0o600)
        writing.write(token + "\n")
    new.replace(file)
    try:
        yield token
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def linked_token(file: Path, addresses: Iterable[str], directories: Iterable[Path]) -> Iterator[list[Path]]:
    """Links from `addresses` to the token in `file` while the block lasts; none in directories of others."""
    target = file.absolute()
    links: list[Path] = []
    for directory in directories:
        if _make_private(directory):
            links += [directory / name for address in addresses for name in _names(address)]
    try:
        for link in links:
            new = link.with_name(f"{link.name}.{os.getpid()}")
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(link)
        yield links
    finally:
        for link in links:
            if link.is_symlink() and link.readlink() == target:  # a later server may have the address by now
                link.unlink(missing_ok=True)


def find_token(address: str, directories: Iterable[Path]) -> str | None:
    """The token of the server of this user at `address`; None: there is no such server on this machine."""
    found: list[tuple[float, str]] = []
    for directory in directories:
        if _is_private(directory):
            reads = (_read(directory / name) for name in _names(address))
            found += [read for read in reads if read is not None]
    return max(found)[1] if found else None


def _names(address: str) -> list[str]:
    """The file names that stand for an address; none for one of another machine."""
    if address.startswith(UNIX):
        path = os.path.realpath(address.removeprefix(UNIX))
        return ["unix-" + hashlib.sha256(os.fsencode(path)).hexdigest()[:32]]
    url = urlsplit(address)
    port = url.port or {"https": 443}.get(url.scheme, 80)
    host = url.hostname or ""
    if host == "localhost":
        return [f"{loopback}:{port}" for loopback in LOOPBACK]
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return []
    shown = f"[{found}]" if found.version == 6 else str(found)
    return [f"{shown}:{port}"] if found.is_loopback else []


def _make_private(directory: Path) -> bool:
    """Whether the directory is there and ours alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_private(directory)


def _is_private(directory: Path) -> bool:
    """A link that another user could place here would make a client send any file of ours as its token."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return ours and all(map(_is_fixed, Path(os.path.realpath(directory)).parents))


def _is_fixed(directory: Path) -> bool:
    """Whether no other user but root can replace what is in the directory."""
    found = directory.stat()
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and not open_to_all


def _read(link: Path) -> tuple[float, str] | None:
    """When the link was made, and the token behind it."""
    try:
        made = link.lstat().st_mtime
        with os.fdopen(os.open(link, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            return made, file.read(LONGEST).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
