"""The bytes of a request in transit: admitted within a bound, forwarded without a copy, freed at once.

`ByteAdmission` bounds the bytes being read and forwarded, `RetainedBytes` the bytes kept for a retry. This
module does not parse: see `request_parser.py` and the dialects.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from aiohttp import payload
from aiohttp.abc import AbstractStreamWriter

HeldBytes = bytes | bytearray | memoryview


class LazyBytes(Protocol):
    """Bytes that are generated when they are sent, the same each time."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[bytes]: ...


BodyPart = HeldBytes | LazyBytes

BRIEF = 64 * 1024  # bytes up to which a body does not wait for larger ones
BRIEF_SHARE = 8  # brief bodies get this part of the bound in addition
LEAST_BRIEF = 16  # brief bodies that must fit into that part
OTHERS_SHARE = 4  # one body, or one attempt's bodies together, leave this part of the bound to others
SMALL = 16 * 1024  # bytes up to which a body is sent together with its headers
SLICE = 256 * 1024  # bytes written before checking whether the socket can take more


class ByteAdmission:
    """A bound on bytes, first come, first served. A holder of the largest share leaves a part to others.

    `within`: a larger bound that also applies, shared with other admissions. `brief`: the admission for brief
    bodies.
    """

    def __init__(self, bound: int, within: ByteAdmission | None = None) -> None:
        self.bound = bound
        self.most_each = bound if within is not None else bound - bound // OTHERS_SHARE
        self.used = 0
        self._within = within
        self.brief: ByteAdmission | None = None
        if within is not None:
            self.brief = within.brief and ByteAdmission(within.brief.most_each, within.brief)
        elif bound // BRIEF_SHARE >= LEAST_BRIEF * BRIEF:
            self.brief = ByteAdmission(bound // BRIEF_SHARE)
        self._growing = asyncio.Lock()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()  # bound: one for each waiting call

    async def take(self, size: int) -> AdmittedBytes:
        """Wait until `size` bytes fit."""
        if self.brief is not None and size <= BRIEF:
            return await self.brief.take(size)
        size = min(size, self.most_each)
        if self._waiting or self.used + size > self.bound:
            await self._wait(size)
        else:
            self.used += size
        try:
            return AdmittedBytes(
                self, size, await self._within.take(size) if self._within is not None else None
            )
        except BaseException:  # boundary: releases, then raises again
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
                self.give(size)  # the bytes were already granted
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


class AdmittedBytes:
    """A share of the admitted bytes, released once."""

    def __init__(self, admission: ByteAdmission, size: int, within: AdmittedBytes | None) -> None:
        self._admission = admission
        self._size = size
        self._within = within
        self._grows = False

    async def grow(self, size: int) -> None:
        """Hold `size` bytes in total. One body of unknown length at a time may exceed the bound.

        So a growing body never waits for another one that waits for it.
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


class RetainedBytes:
    """A bound on the bytes kept in memory for a retry; bytes that do not fit are not kept."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.used = 0

    def take(self, size: int) -> bool:
        if self.used + size > self.bound:
            return False
        self.used += size
        return True


class RequestBody:
    """The body to send. After sending, it is kept for a retry if it fits; `free` drops it."""

    def __init__(
        self,
        parts: tuple[BodyPart, ...],
        admitted: AdmittedBytes | None = None,
        retention: RetainedBytes | None = None,
    ) -> None:
        self._parts: tuple[BodyPart, ...] | None = parts
        self._admitted = admitted
        self._retention = retention
        self._retained = False
        self._measure(parts)

    def _measure(self, parts: tuple[BodyPart, ...]) -> None:
        self.size = sum([len(part) for part in parts])
        self._held = sum([len(part) for part in parts if isinstance(part, HeldBytes)])

    @property
    def at_hand(self) -> bool:
        """Whether the body can be sent (again)."""
        return self._parts is not None

    def replace(self, parts: tuple[BodyPart, ...]) -> None:
        """Send `parts` instead; the old ones, if they were sent, are kept no longer."""
        self._release_retained()
        self._parts = parts
        self._measure(parts)

    def to_bytes(self) -> bytes:
        """Return the whole body, for an upstream in this process."""
        assert self._parts is not None
        return b"".join([piece for part in self._parts for piece in _split_part(part)])

    async def write(self, writer: AbstractStreamWriter) -> None:
        assert self._parts is not None
        if self.size > SMALL:
            writer.send_headers()  # otherwise aiohttp joins them with the body, which copies it
        for part in self._parts:
            for piece in _split_part(part):
                await writer.write(piece)
        self._finish_send()

    def _finish_send(self) -> None:
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
        self._release_retained()

    def _release_retained(self) -> None:
        if self._retained and self._retention is not None:
            self._retained = False
            self._retention.used -= self._held


class BodyPayload(payload.Payload):
    """A `RequestBody` in the form that aiohttp's client sends; it holds no bytes itself."""

    _autoclose = True

    def __init__(self, body: RequestBody) -> None:
        super().__init__(None, content_type="application/json")
        self._size = body.size
        self._body = body

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a request body in transit cannot be decoded")

    async def write(self, writer: AbstractStreamWriter) -> None:
        await self._body.write(writer)


def _split_part(part: BodyPart) -> Iterator[HeldBytes]:
    if not isinstance(part, HeldBytes):
        yield from part.pieces()
    elif len(part) <= SLICE:
        yield part
    else:
        view = memoryview(part)
        for start in range(0, len(part), SLICE):
            yield view[start : start + SLICE]


def join_request(key: str, head: bytes, messages: BodyPart | None) -> tuple[BodyPart, ...]:
    """Return the parts of a request: the keys of the JSON object `head`, and `messages` under `key`."""
    if messages is None:
        return (head,)
    return b'{"%s":' % key.encode(), messages, b"}" if head == b"{}" else b"," + head[1:]
