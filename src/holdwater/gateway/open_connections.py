"""Bounds the connections of a gateway: in total, per attempt, and per client that has sent no valid key.

A connection is a stranger's until it carries a request with a valid key; a stranger's connection is closed
soon. So no sandbox can use up the worker's files. `connection.py` has the connection itself.
"""

from __future__ import annotations

import asyncio
import socket as sockets
import struct
from collections.abc import Callable
from typing import Protocol

STRANGER_SECONDS = 30.0  # until the first request with a valid key
MOST_EACH = 1024  # per attempt, or per process or address without a valid key
SHARE, SHARE_EACH = 2, 8  # parts of the process's file limit: for all, and for each
LEAST, LEAST_EACH = 64, 16
_CREDENTIALS = struct.Struct("3i")  # process, user and group

ConnectionOwner = int | str
"""An attempt's id, or the name of a stranger's process or address."""


class ClientConnection(Protocol):
    """The part of a connection that this module needs."""

    transport: asyncio.Transport | None
    since: float  # by the loop's clock
    owner: ConnectionOwner
    calls: int  # in flight

    def force_close(self) -> None: ...


OnClosed = Callable[[ClientConnection, int, str], None]
"""Takes a connection that is about to be closed, the status, and the reason."""


class OpenConnections:
    """The open connections. `files`: the process's limit on open files."""

    def __init__(self, files: int, on_closed: OnClosed) -> None:
        self.most = max(LEAST, files // SHARE)
        self.most_each = max(LEAST_EACH, min(MOST_EACH, files // SHARE_EACH))
        self.patience = STRANGER_SECONDS
        self._on_closed = on_closed
        # In order of arrival; bound: `most`.
        self._by_owner: dict[ConnectionOwner, dict[ClientConnection, None]] = {}
        self._strangers: dict[ClientConnection, None] = {}
        self.count = 0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: ClientConnection) -> None:
        """Add a new connection, as a stranger's."""
        connection.since = asyncio.get_running_loop().time()
        connection.owner = name_peer(connection.transport)
        self._strangers[connection] = None
        self.count += 1
        self._put(connection)
        if self.count > self.most:
            self._shed(self._strangers, self.most)
        if self._timer is None:
            self._start_timer(connection)

    def claim(self, connection: ClientConnection, attempt: int) -> None:
        """Assign the connection to `attempt`, whose key a request on it carried."""
        if connection.owner == attempt:
            return
        self._take(connection)
        connection.owner = attempt
        self._put(connection)

    def remove(self, connection: ClientConnection) -> None:
        """Remove a closed connection."""
        if connection in self._by_owner.get(connection.owner, ()):
            self._take(connection)
            self.count -= 1

    def shut(self, connection: ClientConnection, status: int, why: str) -> None:
        """Close the connection and report the reason."""
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
        """Close the oldest connection without calls in flight, or else the newest one."""
        idle = next((connection for connection in group if not connection.calls), None)
        connection = next(reversed(group)) if idle is None else idle
        self.shut(connection, 503, f"connection closed: more than {most} are open")

    def _start_timer(self, oldest: ClientConnection) -> None:
        self._timer = asyncio.get_running_loop().call_at(oldest.since + self.patience, self._close_strangers)

    def _close_strangers(self) -> None:
        """Close the strangers' connections whose time is up."""
        self._timer = None
        over = asyncio.get_running_loop().time() - self.patience
        while (oldest := next(iter(self._strangers), None)) is not None:
            if oldest.since > over:
                return self._start_timer(oldest)
            self.shut(oldest, 408, f"no request with a valid key within {self.patience:g} s")
        return None


def name_peer(transport: asyncio.BaseTransport | None) -> str:
    """Return a name for the other end of a connection: its process, or its address."""
    if (process := find_peer_process(transport)) is not None:
        return f"process {process}"
    peer = transport.get_extra_info("peername") if transport is not None else None
    return f"address {peer[0]}" if isinstance(peer, tuple) else "unknown"


def find_peer_process(transport: asyncio.BaseTransport | None) -> int | None:
    """Return the id of the process at the other end of a unix socket."""
    socket = transport.get_extra_info("socket") if transport is not None else None
    if socket is None or socket.family != sockets.AF_UNIX:
        return None
    try:
        content = socket.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return None  # the peer is gone
    process: int = _CREDENTIALS.unpack(content)[0]
    return process
