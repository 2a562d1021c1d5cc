"""Reads a request body into one buffer, within the admission, the size cap and a limit on idle time.

`RequestBody` releases the admitted bytes after the body was forwarded; `request_parser.py` parses the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from aiohttp import web

from .body import AdmittedBytes, ByteAdmission
from .encodings import DECODERS, InvalidEncoding
from .value_count import ValueCount

UNKNOWN_SIZE = 256 * 1024  # bytes admitted at first if the length is unknown
LARGEST_JOINED = 8 * 1024 * 1024  # largest body, in bytes, whose pieces are kept and joined
FEW_PIECES, COARSE_PIECE = 64, 4096  # beyond so many pieces, the average piece has at least these bytes
DECODE_STEP = 64 * 1024  # bytes of decoder input or output before other tasks run
PATIENCE = 30.0  # seconds spent waiting for the next bytes of a body, in total
SLOWEST_RATE = 64 * 1024  # bytes per second that reset the patience


class UnreadableBody(Exception):
    """The body cannot be used; `status` is the status of the response."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def make_oversize_error(cap: int) -> UnreadableBody:
    return UnreadableBody(f"the body is larger than the {cap} bytes that are allowed", 413)


async def read_body(
    request: web.BaseRequest, admission: ByteAdmission, cap: int
) -> tuple[bytearray, AdmittedBytes]:
    """Return the decompressed body of `request`, and the bytes admitted for it."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in DECODERS:
        raise UnreadableBody(f"unsupported `Content-Encoding`: `{encoding[:40]}`", 415)
    length = request.content_length if encoding == "identity" else None
    if length is not None and length > cap:
        raise make_oversize_error(cap)
    admitted = await admission.take(UNKNOWN_SIZE if length is None else length)
    reader = _BodyReader(request, admitted, cap)
    try:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await _ask_for_body(request)
        return await (
            reader.read_unsized(encoding) if length is None else reader.read_sized(length)
        ), admitted
    except BaseException:  # boundary: releases, then raises again
        admitted.release()
        raise


async def _ask_for_body(request: web.BaseRequest) -> None:
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp takes the written bytes for the start of the response


class _BodyReader:
    def __init__(self, request: web.BaseRequest, admitted: AdmittedBytes, cap: int) -> None:
        self._content = request.content
        self._admitted = admitted
        self._cap = cap
        self._received = 0
        self._patience = PATIENCE
        self._patient_until = PATIENCE * SLOWEST_RATE  # bytes

    async def read_sized(self, length: int) -> bytearray:
        """Return the body, joined once it is complete: a preallocated buffer would be written twice."""
        pieces: list[bytes] = []  # bound: `LARGEST_JOINED` bytes, in pieces of `COARSE_PIECE` but for a few
        at = 0
        while at < length:
            if length > LARGEST_JOINED or len(pieces) > FEW_PIECES + at // COARSE_PIECE:
                return await self._read_in_place(length, pieces)
            pieces.append(await self._read_some())
            at += len(pieces[-1])
        return bytearray().join(pieces)

    async def _read_in_place(self, length: int, pieces: list[bytes]) -> bytearray:
        """Read a body that is too large to hold twice, or whose many tiny pieces would take more memory."""
        body = bytearray(length)
        at = 0
        while at < length:
            piece = pieces.pop(0) if pieces else await self._read_some()
            body[at : at + len(piece)] = piece
            at += len(piece)
        return body

    async def _read_some(self) -> bytes:
        piece = await self._read_piece()
        if not piece:
            raise UnreadableBody("the body ended early")
        return piece

    async def read_unsized(self, encoding: str) -> bytearray:
        body = bytearray()
        self._values = ValueCount()
        decoder = DECODERS[encoding]()
        try:
            while piece := await self._read_piece():
                if self._received > self._cap:  # input that decodes to nothing is bounded too
                    raise make_oversize_error(self._cap)
                for at in range(0, len(piece), DECODE_STEP):
                    await self._decode(decoder.feed(piece[at : at + DECODE_STEP]), body)
                    await asyncio.sleep(0)
            await self._decode(decoder.end(), body)
        except InvalidEncoding as error:
            raise UnreadableBody(f"invalid {encoding} body: {error}") from None
        return body

    async def _decode(self, steps: Iterator[bytes], body: bytearray) -> None:
        """Append the decoded bytes; a body with too many values fails here, before it fills the memory."""
        for decoded in steps:
            await self._make_room(len(body) + len(decoded))
            body += decoded
            if self._values.expect(decoded):
                await asyncio.get_running_loop().run_in_executor(None, self._values.scan, body)
            elif len(decoded) > DECODE_STEP:
                await asyncio.sleep(0)  # a small piece may decode to many bytes: let other tasks run

    async def _read_piece(self) -> bytes:
        if self._content._buffer or self._content.at_eof():
            piece = self._content.read_nowait()
        else:
            piece = await self._wait_piece()
        self._received += len(piece)
        if self._received >= self._patient_until:
            self._patience, self._patient_until = PATIENCE, self._received + PATIENCE * SLOWEST_RATE
        return piece

    async def _wait_piece(self) -> bytes:
        """Return the next bytes. A slow body would otherwise keep its share of the admission from others."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        try:
            async with asyncio.timeout(self._patience):
                return await self._content.readany()
        except TimeoutError:
            raise UnreadableBody("timed out waiting for the request body", 408) from None
        except web.RequestPayloadError as error:
            raise UnreadableBody(f"the body cannot be read: {error}") from None
        finally:
            self._patience -= clock() - begun

    async def _make_room(self, size: int) -> None:
        if size > self._cap:
            raise make_oversize_error(self._cap)
        await self._admitted.grow(size)
