"""Reads the body of a request into one buffer, within the admission, the cap and a limit on silence.

`Body` gives back what is admitted, when the bytes have left again; `recorder.py` parses what is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiohttp import web

from .body import Admission, Admitted
from .encodings import DECODERS, Garbled
from .value_count import ValueCount

UNKNOWN = 256 * 1024  # bytes admitted at first where the length is not known
JOINED = 8 * 1024 * 1024  # bytes of a body up to which its pieces are kept and joined
FEW, COARSE = 64, 4096  # pieces, and bytes of each on average beyond so many
TURN = 64 * 1024  # bytes that are decoded, or come out of that, before the loop goes on
PATIENCE = 30.0  # seconds that are waited for the next bytes of a body, in all
SLOWEST = 64 * 1024  # bytes a second that earn the same patience again


class Unreadable(Exception):
    """There is no body to go on with; `status` is the answer to that."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def too_large(cap: int) -> Unreadable:
    return Unreadable(f"the body is larger than the {cap} bytes that are allowed", 413)


async def read_body(request: web.BaseRequest, admission: Admission, cap: int) -> tuple[bytearray, Admitted]:
    """The body of `request`, decompressed, and what was admitted for it."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in DECODERS:
        raise Unreadable(f"`Content-Encoding` is not supported: `{encoding[:40]}`", 415)
    length = request.content_length if encoding == "identity" else None
    if length is not None and length > cap:
        raise too_large(cap)
    admitted = await admission.take(UNKNOWN if length is None else length)
    reader = _Reader(request, admitted, cap)
    try:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await _ask_for_body(request)
        return await (reader.unknown(encoding) if length is None else reader.known(length)), admitted
    except BaseException:  # boundary: given back, then raised again
        admitted.release()
        raise


async def _ask_for_body(request: web.BaseRequest) -> None:
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp takes what was written for the start of the response


class _Reader:
    def __init__(self, request: web.BaseRequest, admitted: Admitted, cap: int) -> None:
        self._content = request.content
        self._admitted = admitted
        self._cap = cap
        self._received = 0
        self._patience = PATIENCE
        self._patient_until = PATIENCE * SLOWEST  # bytes

    async def known(self, length: int) -> bytearray:
        """Joined when all of it is there: a buffer that is made before is written twice."""
        pieces: list[bytes] = []  # bound: `JOINED` bytes, in pieces of `COARSE` but for a few
        at = 0
        while at < length:
            if length > JOINED or len(pieces) > FEW + at // COARSE:
                return await self._in_place(length, pieces)
            pieces.append(await self._some())
            at += len(pieces[-1])
        return bytearray().join(pieces)

    async def _in_place(self, length: int, pieces: list[bytes]) -> bytearray:
        """What is too large to be there twice, or comes in crumbs that would weigh more than it does."""
        body = bytearray(length)
        at = 0
        while at < length:
            piece = pieces.pop(0) if pieces else await self._some()
            body[at : at + len(piece)] = piece
            at += len(piece)
        return body

    async def _some(self) -> bytes:
        piece = await self._piece()
        if not piece:
            raise Unreadable("the body ended early")
        return piece

    async def unknown(self, encoding: str) -> bytearray:
        body = bytearray()
        self._values = ValueCount()
        decoder = DECODERS[encoding]()
        try:
            while piece := await self._piece():
                if self._received > self._cap:  # what decodes to nothing is not endless either
                    raise too_large(self._cap)
                for at in range(0, len(piece), TURN):
                    await self._decode(decoder.feed(piece[at : at + TURN]), body)
                    await asyncio.sleep(0)
            await self._decode(decoder.end(), body)
        except Garbled as error:
            raise Unreadable(f"the body is not {encoding}: {error}") from None
        return body

    async def _decode(self, steps: Iterator[bytes], body: bytearray) -> None:
        """Add what comes next; what has too many values ends here, before it fills the memory."""
        for decoded in steps:
            await self._make_room(len(body) + len(decoded))
            body += decoded
            if self._values.expect(decoded):
                await asyncio.get_running_loop().run_in_executor(None, self._values.look, body)
            elif len(decoded) > TURN:
                await asyncio.sleep(0)  # a small piece may hold much: others have their turn

    async def _piece(self) -> bytes:
        if self._content._buffer or self._content.at_eof():
            piece = self._content.read_nowait()
        else:
            piece = await self._wait()
        self._received += len(piece)
        if self._received >= self._patient_until:
            self._patience, self._patient_until = PATIENCE, self._received + PATIENCE * SLOWEST
        return piece

    async def _wait(self) -> bytes:
        """The next bytes. A body that trickles in would keep its place in the admission from others."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            async with asyncio.timeout(self._patience):
                return await self._content.readany()
        except TimeoutError:
            raise Unreadable("the body stopped coming", 408) from None
        except web.RequestPayloadError as error:
            raise Unreadable(f"the body cannot be read: {error}") from None
        finally:
            self._patience -= clock() - begun

    async def _make_room(self, size: int) -> None:
        if size > self._cap:
            raise too_large(self._cap)
        await self._admitted.grow(size)
