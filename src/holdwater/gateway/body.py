"""The bytes of a request on their way: admitted within a bound, forwarded without a copy, freed at once.

`Admission` bounds what is being read and forwarded, `Retention` what is kept for another try of a call.
What the bytes mean is for `recorder.py` and the dialects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

Held = bytes | bytearray | memoryview


class Lazy(Protocol):
    """Bytes that are made when they are sent, the same each time."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[bytes]: ...


Part = Held | Lazy

SMALL = 16 * 1024  # bytes up to which a body leaves together with its headers
SLICE = 256 * 1024  # bytes written before the socket is asked whether it can take more


class Admission:
    """A bound on bytes, first come first served. What is larger than the bound is admitted alone."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0
        self._growing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # one for each call that waits

    async def take(self, size: int) -> Admitted:
        """Wait until `size` bytes fit."""
        size = min(size, self.bound)
        if self._waiting or self.used + size > self.bound:
            await self._wait(size)
        else:
            self.used += size
        return Admitted(self, size)

    async def _wait(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give(size)  # its turn had come
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()
            raise

    def give(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.bound:
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.used += size
                turn.set_result(None)


class Admitted:
    """A share of the admitted bytes, given back once."""

    def __init__(self, admission: Admission, size: int) -> None:
        self._admission = admission
        self._size = size
        self._grows = False

    async def grow(self, size: int) -> None:
        """Hold `size` bytes in all. Of the bodies of unknown length one at a time may exceed the bound.

        So a body that grows never waits for another that waits for it.
        """
        if size <= self._size:
            return
        if not self._grows:
            await self._admission._growing.acquire()
            self._grows = True
        self._admission.used += size - self._size
        self._size = size

    def release(self) -> None:
        if self._grows:
            self._grows = False
            self._admission._growing.release()
        size, self._size = self._size, 0
        if size:
            self._admission.give(size)


class Retention:
    """A bound on the bytes that wait in memory for a second try; what does not fit is not kept."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.bound:
            return False
        self.used += size
        return True


class Body:
    """What is sent. Once that is done it is kept for another try, if it fits; `free` lets go of it."""

    def __init__(
        self, parts: tuple[Part, ...], admitted: Admitted | None = None, retention: Retention | None = None
    ) -> None:
        self._parts: tuple[Part, ...] | None = parts
        self._admitted = admitted
        self._retention = retention
        self._retained = False
        self._measure(parts)

    def _measure(self, parts: tuple[Part, ...]) -> None:
        self.size = sum([len(part) for part in parts])
        self._held = sum([len(part) for part in parts if isinstance(part, Held)])

    @property
    def at_hand(self) -> bool:
        """Can it be sent (again)?"""
        return self._parts is not None

    def replace(self, parts: tuple[Part, ...]) -> None:
        """Send `parts` instead, before anything was sent."""
        self._parts = parts
        self._measure(parts)

    def taken(self) -> bytes:
        """All of it, for an upstream in this process."""
        assert self._parts is not None
        return b"".join([piece for part in self._parts for piece in _pieces(part)])

    async def write(self, writer: AbstractStreamWriter) -> None:
        assert self._parts is not None
        if self.size > SMALL:
            writer.send_headers()  # or else they would be joined with the body: a copy of it
        for part in self._parts:
            for piece in _pieces(part):
                await writer.write(piece)
        self._sent()

    def _sent(self) -> None:
        if self._admitted is not None:
            self._admitted.release()
        if self._parts is None or self._retained:
            return
        self._retained = self._retention is not None and self._retention.take(self._held)
        if not self._retained:
            self._parts = None

    def free(self) -> None:
        self._parts = None
        if self._admitted is not None:
            self._admitted.release()
        if self._retained and self._retention is not None:
            self._retained = False
            self._retention.used -= self._held


class Payload(payload.Payload):
    """A `Body` in the form that aiohttp's client sends; holds no bytes of its own."""

    _autoclose = True

    def __init__(self, body: Body) -> None:
        super().__init__(None, content_type="application/json")
        self._size = body.size
        self._body = body

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a body on its way is not decoded")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self._body.write(writer)


def _pieces(part: Part) -> Iterator[Held]:
    if not isinstance(part, Held):
        yield from part.pieces()
    elif len(part) <= SLICE:
        yield part
    else:
        view = memoryview(part)
        for start in range(0, len(part), SLICE):
            yield view[start : start + SLICE]


def joined(key: str, head: bytes, messages: Part | None) -> tuple[Part, ...]:
    """A request of the keys in the JSON object `head` and, under `key`, the array `messages`, in parts."""
    if messages is None:
        return (head,)
    return b'{"%s":' % key.encode(), messages, b"}" if head == b"{}" else b"," + head[1:]
