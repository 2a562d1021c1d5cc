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

BRIEF = 64 * 1024  # bytes up to which a body does not wait for larger ones
BRIEF_SHARE = 8  # these bodies have this part of the bound besides it
LEAST_BRIEF = 16  # of them have to fit into that part
OTHERS = 4  # one body, or the bodies of one attempt, leave this part of the bound to others
SMALL = 16 * 1024  # bytes up to which a body leaves together with its headers
SLICE = 256 * 1024  # bytes written before the socket is asked whether it can take more


class Admission:
    """A bound on bytes, first come first served. One who holds the most that it may leaves a part to others.

    `within`: a larger bound that holds as well, for bytes of several such. `brief`: the one of brief bodies.
    """

    def __init__(self, bound: int, within: Admission | None = None) -> None:
        self.bound = bound
        self.most_each = bound if within is not None else bound - bound // OTHERS
        self.used = 0
        self._within = within
        self.brief: Admission | None = None
        if within is not None:
            self.brief = within.brief and Admission(within.brief.most_each, within.brief)
        elif bound // BRIEF_SHARE >= LEAST_BRIEF * BRIEF:
            self.brief = Admission(bound // BRIEF_SHARE)
        self._growing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # one for each call that waits

    async def take(self, size: int) -> Admitted:
        """Wait until `size` bytes fit."""
        if self.brief is not None and size <= BRIEF:
            return await self.brief.take(size)
        size = min(size, self.most_each)
        if self._waiting or self.used + size > self.bound:
            await self._wait(size)
        else:
            self.used += size
        try:
            return Admitted(self, size, await self._within.take(size) if self._within is not None else None)
        except BaseException:  # boundary: given back, then raised again
            self.give(size)
            raise

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

    def __init__(self, admission: Admission, size: int, within: Admitted | None) -> None:
        self._admission = admission
        self._size = size
        self._within = within
        self._grows = False

    async def grow(self, size: int) -> None:
        """Hold `size` bytes in all. Of the bodies of unknown length one at a time may exceed the bound.

        So a body that grows never waits for another that waits for it.
        """
        if self._within is not None:
            await self._within.grow(size)
        admission = self._admission
        more = min(size, admission.most_each) - self._size
        if more <= 0:
            return
        if not self._grows and admission.used + more > admission.bound:
            await admission._growing.acquire()
            self._grows = True
        admission.used += more
        self._size += more

    def release(self) -> None:
        if self._within is not None:
            self._within.release()
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
