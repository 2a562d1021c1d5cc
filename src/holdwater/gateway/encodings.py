"""Decoders for compressed bodies. Each yields its output in steps, so that a zip bomb hits the size cap."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

import brotli  # type: ignore[import-untyped]
import zstandard

STEP = 1024 * 1024  # bytes decompressed in one step
LARGEST_WINDOW = 8 * 1024 * 1024  # HTTP's limit for zstd
TOO_LONG = "bytes follow its end"


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
