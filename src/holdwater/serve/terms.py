"""On what terms a door is opened: where it listens, and for whom."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..core.errors import BadInput
from ..core.records import MiB
from ..web.visitors import VisitorRules

UNIX = "unix:"
UNIX_HOST = "holdwater"  # what our client has as `Host` where there is no host: at a unix socket


class DoorTerms(NamedTuple):
    """Where a door is, and who may come in."""

    listen: str = "127.0.0.1:8400"  # HOST:PORT, or unix:PATH
    keys: tuple[str, ...] = ()  # none: no key is wanted, and only this machine can reach the door
    separate: bool = True  # an order belongs to the key that it came with
    hosts: tuple[str, ...] = ()  # further names of this server, as clients send them in `Host`
    tls: tuple[Path, Path] | None = None  # certificate, key
    largest_order: int = 64 * MiB  # bytes of a body
    note: Callable[[str, str], None] = lambda kind, message: None  # what is worth knowing, once
    blobs: Path | None = None  # the run's media
    spool: Path | None = None  # a directory for large answers that are read slowly; the system's otherwise
    connections: int = 8192  # at once


class Place(NamedTuple):
    """Where to listen: a path, or a host and a port."""

    path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def local(self) -> bool:
        """Whether none but this machine can come there."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def place_of(terms: DoorTerms) -> Place:
    """Where to listen; BadInput if that is nowhere, or more open than the terms allow."""
    place = _parsed(terms.listen)
    if not place.local and not terms.keys:
        raise BadInput(
            f"`{terms.listen}` can be reached from other machines, and no key is asked for",
            "give `--key-file FILE`, or listen on `127.0.0.1`",
        )
    return place


def rules_of(terms: DoorTerms, place: Place) -> VisitorRules:
    """What a request to this door needs to be obeyed."""
    own = (
        (UNIX_HOST,) if place.path is not None else () if place.local else (place.host, socket.gethostname())
    )
    names = frozenset(name.lower() for name in (*terms.hosts, *own))
    return VisitorRules(names, place.local, terms.keys)


def secured(terms: DoorTerms) -> ssl.SSLContext | None:
    """What encrypts connections, where that is wanted."""
    if terms.tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate, key = terms.tls
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise BadInput(f"no certificate and key for TLS: `{certificate}`, `{key}`: {error}") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def _parsed(listen: str) -> Place:
    if listen.startswith(UNIX):
        return Place(path=Path(listen.removeprefix(UNIX)))
    host, _, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BadInput(
            f"`--listen` must look like `127.0.0.1:8400` or `unix:/run/holdwater.sock`: `{listen}`"
        )
    return Place(host=host, port=int(port))
