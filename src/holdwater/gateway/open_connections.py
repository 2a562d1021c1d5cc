"""The connections of a gateway: a bound on all of them, and on those of each attempt and each stranger.

A connection is a stranger's until a request with a valid key came on it; it does not stay one for long. So no
sandbox can use up the files of its worker. `connection.py` has the connection itself.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import struct
from collections.abc import Callable
from typing import Protocol

STRANGER_SECONDS = 30.0  # for the first request with a key
MOST_EACH = 1024  # of an attempt, or of a process or an address that has shown no key
SHARE, SHARE_EACH = 2, 8  # all take at most this part of the files that the process may have; each one this
LEAST, LEAST_EACH = 64, 16
_CREDENTIALS = struct.Struct("3i")  # process, user and group

Owner = int | str
"""An attempt, or how a stranger is known."""


class ClientConnection(Protocol):
    """What is known of a connection here."""

    transport: asyncio.Transport | None
    since: float  # by the loop's clock
    owner: Owner
    calls: int  # that are being answered

    def force_close(self) -> None: ...


Closed = Callable[[ClientConnection, int, str], None]
"""Takes a connection that is about to be closed, a status that says why, and the reason in words."""


class OpenConnections:
    """`files`: how many the process may have open."""

    def __init__(self, files: int, on_closed: Closed) -> None:
        self.most = max(LEAST, files // SHARE)
        self.most_each = max(LEAST_EACH, min(MOST_EACH, files // SHARE_EACH))
        self.patience = STRANGER_SECONDS
        self._on_closed = on_closed
        # In the order in which they came; bound: `most`.
        self._by_owner: dict[Owner, dict[ClientConnection, None]] = {}
        self._strangers: dict[ClientConnection, None] = {}
        self.count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ClientConnection) -> None:
        """A stranger came."""
        connection.since = asyncio.get_running_loop().time()
        connection.owner = stranger_of(connection.transport)
        self._strangers[connection] = None
        self.count += 1
        self._put(connection)
        if self.count > self.most:
            self._shed(self._strangers, self.most)
        if self._timer is None:
            self._arm(connection)

    def claim(self, connection: ClientConnection, attempt: int) -> None:
        """A request with the key of `attempt` came on it."""
        if connection.owner == attempt:
            return
        self._take(connection)
        connection.owner = attempt
        self._put(connection)

    def remove(self, connection: ClientConnection) -> None:
        """It is closed."""
        if connection in self._by_owner.get(connection.owner, ()):
            self._take(connection)
            self.count -= 1

    def shut(self, connection: ClientConnection, status: int, why: str) -> None:
        """Close it, and say so."""
        self.remove(connection)
        self._on_closed(connection, status, why)
        connection.force_close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _put(self, connection: ClientConnection) -> None:
        group = self._by_owner.setdefault(connection.owner, {})
        group[connection] = None
        if len(group) > self.most_each:
            self._shed(group, self.most_each)

    def _take(self, connection: ClientConnection) -> None:
        self._strangers.pop(connection, None)
        group = self._by_owner[connection.owner]
        del group[connection]
        if not group:
            del self._by_owner[connection.owner]

    def _shed(self, group: dict[ClientConnection, None], most: int) -> None:
        """Close the oldest one that answers no call, or else the latest."""
        idle = next((connection for connection in group if not connection.calls), None)
        connection = next(reversed(group)) if idle is None else idle
        self.shut(connection, 503, f"a connection was closed: more than {most} were open")

    def _arm(self, oldest: ClientConnection) -> None:
        self._timer = asyncio.get_running_loop().call_at(oldest.since + self.patience, self._dismiss)

    def _dismiss(self) -> None:
        """Close the strangers whose time is up."""
        self._timer = None
        over = asyncio.get_running_loop().time() - self.patience
        while (oldest := next(iter(self._strangers), None)) is not None:
            if oldest.since > over:
                return self._arm(oldest)
            self.shut(oldest, 408, f"no request with a valid key came within {self.patience:g} s")
        return None


def stranger_of(transport: asyncio.BaseTransport | None) -> str:
    """How the other end of a connection is known: by its process, or by its address."""
    if (process := process_behind(transport)) is not None:
        return f"process {process}"
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"address {peer[0]}" if isinstance(peer, tuple) else "unknown"


def process_behind(transport: asyncio.BaseTransport | None) -> int | None:
    """The process at the other end of a unix socket."""
    socket = transport.get_extra_info("socket") if transport is not None else None
    if socket is None or socket.family != sockets.AF_UNIX:
        return None
    try:
        content = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None  # it has gone
    process: int = _CREDENTIALS.unpack(content)[0]
    return process
