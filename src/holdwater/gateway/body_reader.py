"""Reads and decompresses a request body within the admission, the size cap and a limit on idle time.

Each decoder yields its output in steps, so that a zip bomb hits the size cap. `RequestBody` releases the
admitted bytes after the body was forwarded; `request_parser.py` parses the body.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

import brotli  # type: ignore[import-untyped]
import zstandard
from aiohttp import web

from .body import AdmittedBytes, ByteAdmission
from .json_checks import ValueCount

STEP = 1024 * 1024  # bytes decompressed in one step
LARGEST_WINDOW = 8 * 1024 * 1024  # HTTP's limit for zstd
TOO_LONG = "bytes follow its end"
UNKNOWN_SIZE = 256 * 1024  # bytes admitted at first if the length is unknown
LARGEST_JOINED = 8 * 1024 * 1024  # largest body, in bytes, whose pieces are kept and joined
FEW_PIECES, COARSE_PIECE = 64, 4096  # beyond so many pieces, the average piece has at least these bytes
DECODE_STEP = 64 * 1024  # bytes of decoder input or output before other tasks run
PATIENCE = 30.0  # seconds spent waiting for the next bytes of a body, in total
SLOWEST_RATE = 64 * 1024  # bytes per second that reset the patience


class InvalidEncoding(Exception):
    """The bytes do not match their declared encoding."""


class BodyDecoder(Protocol):
    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the bytes that `piece` decodes to, at most about `STEP` bytes at a time."""

    def end(self) -> Iterator[bytes]:
        """Yield the remaining bytes after the last piece; raise `InvalidEncoding` if the end is missing."""


class IdentityDecoder:
    def feed(self, piece: bytes) -> Iterator[bytes]:
        yield piece

    def end(self) -> Iterator[bytes]:
        yield from ()


class ZlibDecoder:
    """Decodes gzip and deflate."""

    def __init__(self, window: int) -> None:
        self._decoder = zlib.decompressobj(wbits=window)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            while piece:
                if self._decoder.eof:
                    raise InvalidEncoding(TOO_LONG)
                yield self._decoder.decompress(piece, STEP)
                piece = self._decoder.unconsumed_tail
        except zlib.error as error:
            raise InvalidEncoding(str(error)) from None

    def end(self) -> Iterator[bytes]:
        try:
            while more := self._decoder.decompress(b"", STEP):
                yield more
        except zlib.error as error:
            raise InvalidEncoding(str(error)) from None
        if not self._decoder.eof:
            raise InvalidEncoding("it ended early")
        if self._decoder.unused_data:
            raise InvalidEncoding(TOO_LONG)


class BrotliDecoder:
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            yield self._decoder.process(piece, output_buffer_limit=STEP)
            while not self._decoder.can_accept_more_data():
                yield self._decoder.process(b"", output_buffer_limit=STEP)
        except brotli.error as error:
            raise InvalidEncoding(str(error)) from None

    def end(self) -> Iterator[bytes]:
        if not self._decoder.is_finished():
            raise InvalidEncoding("it ended early")
        yield from ()


class ZstdDecoder:
    """Decodes zstd. A truncated frame yields the bytes that are there, which are not valid JSON."""

    def __init__(self) -> None:
        self._input = _ZstdInput()
        decoder = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._reader = decoder.stream_reader(cast(IO[bytes], self._input))

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self._input.piece = piece
        yield from self._read_steps()

    def end(self) -> Iterator[bytes]:
        self._input.ended = True
        yield from self._read_steps()

    def _read_steps(self) -> Iterator[bytes]:
        try:
            while decoded := self._reader.read1(STEP):
                yield decoded
        except _InputMissing:
            return  # `read1` reads only while it has decoded nothing, so nothing is lost
        except zstandard.ZstdError as error:
            raise InvalidEncoding(str(error)) from None


class _InputMissing(Exception):
    """The decoder needs more input."""


class _ZstdInput:
    """The file that the zstd reader reads from: one piece after the other."""

    def __init__(self) -> None:
        self.piece = b""
        self.ended = False

    def read(self, size: int) -> bytes:
        if not self.piece and not self.ended:
            raise _InputMissing
        piece, self.piece = self.piece, b""
        return piece


DECODERS: dict[str, Callable[[], BodyDecoder]] = {
    "identity": IdentityDecoder,
    "gzip": lambda: ZlibDecoder(31),
    "x-gzip": lambda: ZlibDecoder(31),
    "deflate": lambda: ZlibDecoder(15),
    "br": BrotliDecoder,
    "zstd": ZstdDecoder,
}


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
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # aiohttp takes these bytes for the start of the response
        return await (
            reader.read_unsized(encoding) if length is None else reader.read_sized(length)
        ), admitted
    except BaseException:  # boundary: releases, then raises again
        admitted.release()
        raise


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
            if (size := len(body) + len(decoded)) > self._cap:
                raise make_oversize_error(self._cap)
            await self._admitted.grow(size)
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
