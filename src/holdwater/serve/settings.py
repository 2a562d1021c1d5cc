"""The settings of a server: its address, its API keys, TLS, and the rules for requests that follow from them.

`rollout_server.py` listens; `web/request_rules.py` applies the rules.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from ..core.errors import BadInput
from ..core.records import MiB
from ..gateway.server import LONGEST_SOCKET_PATH
from ..web.request_rules import RequestRules

UNIX = "unix:"
UNIX_HOST = "holdwater"  # the `Host` that our client sends over a unix socket, which has no host


class ServerSettings(NamedTuple):
    """The address of a server, and the clients that may use it."""

    listen: str = "127.0.0.1:8400"  # HOST:PORT, or unix:PATH
    keys: tuple[str, ...] = ()  # API keys; empty: no key is needed, and the server must listen locally
    separate: bool = True  # an order is visible only to the key that sent it
    hosts: tuple[str, ...] = ()  # additional names of this server that clients may send in `Host`
    tls: tuple[Path, Path] | None = None  # certificate, key
    largest_order: int = 64 * MiB  # bytes of a request body
    note: Callable[[str, str], None] = lambda kind, message: None  # reports an event: kind, message
    blobs: Path | None = None  # the directory of the run's media
    spool: Path | None = None  # directory for large responses to slow clients; None: the system's
    connections: int = 8192  # open at once
    # Makes the addresses known while the server listens on them; the first request is handled after that.
    announce: Callable[[Sequence[str]], AbstractAsyncContextManager[object]] = lambda addresses: nullcontext()


class ListenAddress(NamedTuple):
    """The address to listen on: a path, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the address."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def resolve_address(terms: ServerSettings) -> ListenAddress:
    """Return the address to listen on; raise `BadInput` if it is invalid, or public without an API key."""
    place = parse_listen(terms.listen, "--listen")
    if not place.local and not terms.keys:
        raise BadInput(
            f"`{terms.listen}` can be reached from other machines, but no API key is set",
            "give `--key-file FILE`, or listen on `127.0.0.1`",
        )
    return place


def make_rules(terms: ServerSettings, place: ListenAddress) -> RequestRules:
    """Return the rules that a request to this server must meet."""
    own = (
        (UNIX_HOST,) if place.path is not None else () if place.local else (place.host, socket.gethostname())
    )
    names = frozenset(name.lower() for name in (*terms.hosts, *own))
    return RequestRules(names, place.local, terms.keys)


def make_tls_context(terms: ServerSettings) -> ssl.SSLContext | None:
    """Return the TLS context, or None for a server without TLS."""
    if terms.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate, key = terms.tls
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise BadInput(
            f"cannot load the certificate and key for TLS: `{certificate}`, `{key}`: {error}"
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def parse_listen(listen: str, flag: str) -> ListenAddress:
    """Parse `HOST:PORT` or `unix:PATH`; raise `BadInput`, which names the flag."""
    if listen.startswith(UNIX):
        path = Path(listen.removeprefix(UNIX))
        if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
            raise BadInput(
                f"the socket path is too long, at most {LONGEST_SOCKET_PATH} bytes are allowed: `{path}`"
            )
        return ListenAddress(path=path)
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BadInput(f"`{flag}` must look like `127.0.0.1:8400` or `unix:/run/holdwater.sock`: `{listen}`")
    return ListenAddress(host=host, port=int(port))


def clear_socket(path: Path) -> None:
    """Remove a socket on which no process listens; raise `BadInput` for one in use."""
    if not path.exists():
        return
    if not path.is_socket():
        raise BadInput(f"the path exists and is not a socket: `{path}`")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(1.0)
        try:
            caller.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise BadInput(f"another process already listens on this socket: `{path}`")
