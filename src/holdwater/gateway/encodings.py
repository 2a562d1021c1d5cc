"""Bodies that come compressed: each decoder gives what it has in steps, so that a bomb meets the cap."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import IO, Protocol, cast

import brotli  # type: ignore[import-untyped]
import zstandard

STEP = 1024 * 1024  # bytes that are decompressed at once
LARGEST_WINDOW = 8 * 1024 * 1024  # what HTTP allows zstd
TOO_LONG = "bytes follow its end"


class Garbled(Exception):
    """The bytes are not what their encoding promised."""


class Decoder(Protocol):
    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What `piece` makes known, at most about `STEP` bytes at a time."""

    def end(self) -> Iterator[bytes]:
        """What is left after the last piece; raises `Garbled` if the end is missing."""


class Identity:
    def feed(self, piece: bytes) -> Iterator[bytes]:
        yield piece

    def end(self) -> Iterator[bytes]:
        yield from ()


class Zlib:
    """gzip and deflate."""

    def __init__(self, window: int) -> None:
        self._decoder = zlib.decompressobj(wbits=window)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            while piece:
                if self._decoder.eof:
                    raise Garbled(TOO_LONG)
                yield self._decoder.decompress(piece, STEP)
                piece = self._decoder.unconsumed_tail
        except zlib.error as error:
            raise Garbled(str(error)) from None

    def end(self) -> Iterator[bytes]:
        try:
            while more := self._decoder.decompress(b"", STEP):
                yield more
        except zlib.error as error:
            raise Garbled(str(error)) from None
        if not self._decoder.eof:
            raise Garbled("it ended early")
        if self._decoder.unused_data:
            raise Garbled(TOO_LONG)


class Brotli:
    def __init__(self) -> None:
        self._decoder = brotli.Decompressor()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            yield self._decoder.process(piece, output_buffer_limit=STEP)
            while not self._decoder.can_accept_more_data():
                yield self._decoder.process(b"", output_buffer_limit=STEP)
        except brotli.error as error:
            raise Garbled(str(error)) from None

    def end(self) -> Iterator[bytes]:
        if not self._decoder.is_finished():
            raise Garbled("it ended early")
        yield from ()


class Zstd:
    """Of a frame that was cut it gives the bytes that there are, which are no JSON."""

    def __init__(self) -> None:
        self._input = _ZstdInput()
        decoder = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        self._reader = decoder.stream_reader(cast(IO[bytes], self._input))

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self._input.piece = piece
        yield from self._steps()

    def end(self) -> Iterator[bytes]:
        self._input.ended = True
        yield from self._steps()

    def _steps(self) -> Iterator[bytes]:
        try:
            while decoded := self._reader.read1(STEP):
                yield decoded
        except _NoInput:
            return  # `read1` reads only while it has decoded nothing, so nothing is lost
        except zstandard.ZstdError as error:
            raise Garbled(str(error)) from None


class _NoInput(Exception):
    """More has to be fed first."""


class _ZstdInput:
    """The file that a reader of zstd reads: one piece after the other."""

    def __init__(self) -> None:
        self.piece = b""
        self.ended = False

    def read(self, size: int) -> bytes:
        if not self.piece and not self.ended:
            raise _NoInput
        piece, self.piece = self.piece, b""
        return piece


DECODERS: dict[str, Callable[[], Decoder]] = {
    "identity": Identity,
    "gzip": lambda: Zlib(31),
    "x-gzip": lambda: Zlib(31),
    "deflate": lambda: Zlib(15),
    "br": Brotli,
    "zstd": Zstd,
}
