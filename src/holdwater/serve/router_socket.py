"""A ROUTER socket of ZeroMQ: receives requests and sends replies, no faster than each client reads.

It knows no protocol but this: a message of three frames with the id of no request means nothing to a client,
so that it shows whether the client is connected. `peer_book.py` keeps the clients.
"""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import Iterable, Sequence
from typing import Any, Self, cast

import zmq
import zmq.asyncio

from ..core.errors import BadInput
from ..core.records import MiB
from .peer_book import PeerBook
from .settings import ListenAddress, clear_socket

LARGEST_REQUEST = 64 * MiB
MOST_UNSENT = 4  # messages to one client that wait in the socket
RETRY = 0.05  # seconds until a client that reads slowly is tried again
HEARTBEAT = 5.0  # seconds between two heartbeats on a connection ...
SILENCE = 15.0  # ... which is closed after so many without an answer
CLOSING = 0.5  # seconds to send messages when the socket closes
_OWN_ADDRESS = "inproc://holdwater"


class RouterSocket:
    """`async with RouterSocket(place) as socket` listens on `socket.address`."""

    def __init__(self, place: ListenAddress) -> None:
        self.address = ""
        self._place = place
        self.peers = PeerBook(self._probe)

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        try:
            self._socket = _make_socket(self._context)
            self._socket.bind(_OWN_ADDRESS)
            self.peers.begin(await self._introduce())
            self.address = self._listen()
        except BaseException:  # boundary: closes the socket, then raises again
            self._close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self._close()

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message: the client, and what it sent."""
        frames: list[bytes] = await self._socket.recv_multipart()
        self.peers.note(frames[0])
        return frames

    async def send(self, peer: bytes, request_id: bytes, messages: Iterable[tuple[bytes, bytes]]) -> bool:
        """Send messages, each a kind and a content; return False if the client is gone."""
        for kind, content in messages:
            while (problem := self._try_send([peer, request_id, kind, content])) is not None:
                if not isinstance(problem, zmq.Again):
                    self.peers.drop(peer)
                    return False
                await asyncio.sleep(RETRY)
        return True

    def _probe(self, peer: bytes) -> bool:
        """Return whether a client is connected, by a message that it ignores."""
        problem = self._try_send([peer, b"", b"reply", b""])
        return problem is None or isinstance(problem, zmq.Again)

    def _try_send(self, frames: Sequence[bytes]) -> zmq.ZMQError | None:
        """Send a message now; return `Again` if the client reads slowly, or the error if it is gone."""
        # With this flag the message is sent, or refused, before the call returns.
        sent = cast(asyncio.Future[Any], self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False))
        problem = sent.exception()
        if problem is None:
            return None
        if isinstance(problem, zmq.ZMQError) and problem.errno in (errno.EAGAIN, errno.EHOSTUNREACH):
            return problem
        raise problem

    async def _introduce(self) -> bytes:
        """Return the name that the socket gives to a first connection, which is closed again."""
        own = self._context.socket(zmq.DEALER)
        try:
            own.connect(_OWN_ADDRESS)
            await own.send(b"")
            frames: list[bytes] = await self._socket.recv_multipart()
            return frames[0]
        finally:
            own.close(linger=0)

    def _listen(self) -> str:
        """Bind the address of the settings; return it as clients write it."""
        place = self._place
        host = "127.0.0.1" if place.host == "localhost" else place.host
        address = f"tcp://[{host}]:{place.port}" if ":" in host else f"tcp://{host}:{place.port}"
        if place.path is not None:
            clear_socket(place.path)
            address = f"ipc://{place.path}"
        try:
            self._socket.setsockopt(zmq.IPV6, ":" in host)
            self._socket.bind(address)
            if place.path is not None:
                place.path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        except (zmq.ZMQError, OSError) as error:
            raise BadInput(f"cannot listen on `{address}`: {error.strerror}") from None
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close(self) -> None:
        self._context.destroy(linger=int(1000 * CLOSING))
        if self._place.path is not None:
            self._place.path.unlink(missing_ok=True)


def _make_socket(context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error, not silence
    socket.setsockopt(zmq.SNDHWM, MOST_UNSENT)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_REQUEST)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * SILENCE))
    return socket
