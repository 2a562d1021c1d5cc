"""The token of a server: the server creates it at its start, and clients of the same user find it by address.

The token is a file in the server's run directory, with mode 0600. Each directory that clients search has a
link to it, named by the address. `request_rules.py` checks the token.
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

UNIX_SCHEME = "unix:"
CACHE_VARIABLE = "HOLDWATER_CACHE"
LONGEST_TOKEN = 4096  # bytes of a file that holds a token
LOOPBACK = ("127.0.0.1", "[::1]")  # addresses of `localhost`


def list_link_directories(env: Mapping[str, str]) -> list[Path]:
    """Return the directories of token links: the user's runtime directory, and one that outlives a logout.

    The latter may be in a home that several machines share, so each machine has its own.
    """
    found = [find_cache(env) / "servers" / socket.gethostname()]
    if (runtime := env.get("XDG_RUNTIME_DIR")) and _is_private(Path(runtime)):
        found.insert(0, Path(runtime, "holdwater"))
    return found


def find_cache(env: Mapping[str, str]) -> Path:
    """Return the user's cache directory for holdwater.

    It is the same with and without `HOME`, because a service may have none.
    """
    if said := env.get(CACHE_VARIABLE):
        return Path(said).absolute()
    if said := env.get("XDG_CACHE_HOME"):
        return Path(said, "holdwater")
    try:
        return Path(env.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir, ".cache", "holdwater")
    except KeyError:  # the user has no passwd entry, and so no home
        return Path(tempfile.gettempdir(), f"holdwater-{os.getuid()}")


@contextmanager
def publish_token(file: Path) -> Iterator[str]:
    """Create a new token and keep it in `file` during the block."""
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
def link_token(file: Path, addresses: Iterable[str], directories: Iterable[Path]) -> Iterator[list[Path]]:
    """Link `addresses` to the token in `file` during the block; skip directories that others can change."""
    target = file.absolute()
    links: list[Path] = []
    for directory in directories:
        if _make_private(directory):
            links += [directory / name for address in addresses for name in _list_names(address)]
    try:
        for link in links:
            new = link.with_name(f"{link.name}.{os.getpid()}")
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            new.replace(link)
        yield links
    finally:
        for link in links:
            if link.is_symlink() and link.readlink() == target:  # a later server may use the address by now
                link.unlink(missing_ok=True)


def find_token(address: str, directories: Iterable[Path]) -> str | None:
    """Return the token of this user's server at `address`; None: no such server on this machine."""
    found: list[tuple[float, str]] = []
    for directory in directories:
        if _is_private(directory):
            reads = (_read_link(directory / name) for name in _list_names(address))
            found += [read for read in reads if read is not None]
    return max(found)[1] if found else None


def _list_names(address: str) -> list[str]:
    """Return the link names of an address; none for an address of another machine."""
    if address.startswith(UNIX_SCHEME):
        path = os.path.realpath(address.removeprefix(UNIX_SCHEME))
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
    """Create the directory if needed; return whether only this user can change it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_private(directory)


def _is_private(directory: Path) -> bool:
    """Whether only this user can place links in the directory.

    Through a link of another user, a client would send any file of ours as its token.
    """
    try:
        found = directory.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return ours and all(map(_is_fixed, Path(os.path.realpath(directory)).parents))


def _is_fixed(directory: Path) -> bool:
    """Whether only this user and root can replace entries of the directory."""
    found = directory.stat()
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    return found.st_uid in (0, os.geteuid()) and not open_to_all


def _read_link(link: Path) -> tuple[float, str] | None:
    """Return the time when the link was made, and its token; None if it is not a valid one."""
    try:
        made = link.lstat().st_mtime
        with os.fdopen(os.open(link, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            return made, file.read(LONGEST_TOKEN).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
