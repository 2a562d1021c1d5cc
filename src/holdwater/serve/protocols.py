"""The further protocols that a server speaks beside HTTP: their settings, and the table that opens them.

A protocol is one module with a class like `VerifiersServer`, and one line in the table. Its library is an
extra, so its module is imported only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..core.errors import BadInput
from ..core.records import Instance
from .backend import ServerBackend
from .settings import ListenAddress, parse_listen

FLAG = "--protocol-listen"


class ProtocolSettings(NamedTuple):
    """What a further protocol needs beside the backend."""

    place: ListenAddress
    directory: Path  # of the run
    suite: str
    agent: str
    keys: Mapping[str, str] = {}  # variable that clients may name -> the key of their endpoint
    queue: int = 4096
    grace: float = 3.0  # seconds until the work of a client that is gone is cancelled
    return_grace: float = 60.0  # the same, after a restart of the server
    # Of a suite that knows the protocol's tasks: a task's instance, and the file in which it keeps scores.
    make_instance: Callable[[dict[str, Any]], Instance] | None = None
    scores: str = ""
    note: Callable[[str, str], None] = lambda kind, message: None  # reports an event: kind, message


class OpenProtocol(Protocol):
    """A server of a further protocol while it listens."""

    address: str


class ProtocolKind(NamedTuple):
    """A further protocol. Its server is loaded when it is used."""

    module: str  # of this package
    server: str  # its class
    package: str  # what the module imports, and who offers it:
    extra: str
    listen: str  # the address where its clients look first


PROTOCOLS = {
    "verifiers": ProtocolKind("verifiers_server", "VerifiersServer", "zmq", "verifiers", "127.0.0.1:5000"),
}


def find_protocol(name: str) -> ProtocolKind:
    """Return a protocol; raise `BadInput` if it is unknown, or if its library is missing."""
    kind = PROTOCOLS.get(name)
    if kind is None:
        known = ", ".join(f"`{known}`" for known in PROTOCOLS)
        raise BadInput(f"unknown protocol: `{name}`", f"known: {known}")
    try:
        import_module(kind.package)
    except ImportError as error:
        raise BadInput(
            f"`--protocol {name}` needs a package that is not installed: {error.name or kind.package}",
            f"`pip install 'holdwater[{kind.extra}]'`",
        ) from None
    return kind


def resolve_place(name: str, listen: str | None, *, unprotected: bool, open_network: bool) -> ListenAddress:
    """Return the address of a protocol without keys; refuse one that others reach, unless asked."""
    listen = listen or find_protocol(name).listen
    place = parse_listen(listen, FLAG)
    if place.path is not None or unprotected:
        return place
    hint = f"give `{FLAG} unix:PATH`, or `--unprotected`"
    if not place.local:
        raise BadInput(
            f"`{listen}` can be reached from other machines, and `{name}` clients send no key", hint
        )
    if open_network:
        raise BadInput(
            f"sandboxes can reach `{listen}` with `--network open`, and `{name}` clients send no key", hint
        )
    return place


def open_protocol(
    name: str, backend: ServerBackend[Any], settings: ProtocolSettings
) -> AbstractAsyncContextManager[OpenProtocol]:
    """Return the server of a protocol, as a context."""
    kind = PROTOCOLS[name]
    server = getattr(import_module(f".{kind.module}", __package__), kind.server)
    opened: AbstractAsyncContextManager[OpenProtocol] = server(backend, settings)
    return opened
