"""Reads the body of a request into one buffer, within the admission, the cap and a limit on silence.

`Body` gives back what is admitted, when the bytes have left again; `recorder.py` parses what is read.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from .body import Admission, Admitted
from .encodings import DECODERS, Garbled

UNKNOWN = 256 * 1024  # bytes admitted at first where the length is not known
JOINED = 8 * 1024 * 1024  # bytes of a body up to which its pieces are kept and joined
FEW, COARSE = 64, 4096  # pieces, and bytes of each on average beyond so many
LONGEST_SILENCE = 60.0  # seconds that a client may take between two pieces of its body


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
        decoder = DECODERS[encoding]()
        try:
            while piece := await self._piece():
                for decoded in decoder.feed(piece):
                    await self._make_room(len(body) + decoder.held + len(decoded))
                    body += decoded
                await self._make_room(len(body) + decoder.held)
            for decoded in decoder.end():
                await self._make_room(len(body) + decoder.held + len(decoded))
                body += decoded
        except Garbled as error:
            raise Unreadable(f"the body is not {encoding}: {error}") from None
        return body

    async def _piece(self) -> bytes:
        if self._content._buffer or self._content.at_eof():
            return self._content.read_nowait()
        try:
            async with asyncio.timeout(LONGEST_SILENCE):
                return await self._content.readany()
        except TimeoutError:
            raise Unreadable("the body stopped coming", 408) from None
        except web.RequestPayloadError as error:
            raise Unreadable(f"the body cannot be read: {error}") from None

    async def _make_room(self, size: int) -> None:
        if size > self._cap:
            raise too_large(self._cap)
        await self._admitted.grow(size)
