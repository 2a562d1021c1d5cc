"""The clients that are connected to a ROUTER socket of ZeroMQ, which itself does not tell.

A probe is a message without content and with the id of no request: clients ignore it, and for a client that
is gone the socket raises an error. `router_socket.py` sends the probes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

# The socket names clients by consecutive numbers: so many beside the known ones are probed.
SCANNED = 16
_NUMBERED = b"\0"  # the first byte of such a name, before four bytes of the number
_NUMBERS = 1 << 32


class PeerBook:
    """The clients of one socket. `probe` sends a probe and returns whether the client is connected."""

    def __init__(self, probe: Callable[[bytes], bool]) -> None:
        self._probe = probe
        self._own: bytes | None = None
        self._newest: int | None = None  # the highest number so far
        self._since: dict[bytes, float] = {}  # client -> when it was first seen; bound: the connections

    def begin(self, own: bytes) -> None:
        """Take the name of a first connection, which is the server's own, as the place to look for others."""
        self._own = own
        self._learn_number(own)

    def note(self, peer: bytes) -> None:
        """Note a client that has sent a message."""
        if peer not in self._since:
            self._since[peer] = time.monotonic()
            self._learn_number(peer)

    def refresh(self, *, scan: bool) -> None:
        """Drop the clients that are gone. With `scan` also find those that have not sent a message."""
        for peer in [peer for peer in self._since if not self._probe(peer)]:
            del self._since[peer]
        if scan:
            for peer in self._list_neighbours():
                if peer not in self._since and peer != self._own and self._probe(peer):
                    self.note(peer)

    def holds(self, peer: bytes) -> bool:
        return peer in self._since

    def drop(self, peer: bytes) -> None:
        self._since.pop(peer, None)

    def list_since(self, at: float) -> list[bytes]:
        """Return the clients that were first seen at this time or later."""
        return [peer for peer, since in self._since.items() if since >= at]

    def _learn_number(self, peer: bytes) -> None:
        if len(peer) == 5 and peer.startswith(_NUMBERED):
            number = int.from_bytes(peer[1:], "big")
            if self._newest is None or 0 < (number - self._newest) % _NUMBERS < _NUMBERS // 2:
                self._newest = number

    def _list_neighbours(self) -> Iterable[bytes]:
        if self._newest is None:
            return
        for number in range(self._newest - SCANNED, self._newest + SCANNED):
            yield _NUMBERED + (number % _NUMBERS).to_bytes(4, "big")
