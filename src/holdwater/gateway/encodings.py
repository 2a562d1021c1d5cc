"""Bodies that come compressed: each decoder gives what it has in steps, so that a bomb meets the cap."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

import brotli  # type: ignore[import-untyped]
import zstandard

STEP = 1024 * 1024  # bytes that are decompressed at once
LARGEST_WINDOW = 8 * 1024 * 1024  # what HTTP allows zstd


class Garbled(Exception):
    """The bytes are not what their encoding promised."""


class Decoder(Protocol):
    @property
    def held(self) -> int:
        """Bytes that wait to be decoded."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What `piece` makes known, at most about `STEP` bytes at a time."""

    def end(self) -> Iterator[bytes]:
        """What is left after the last piece; raises `Garbled` if the end is missing."""


class Identity:
    held = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        yield piece

    def end(self) -> Iterator[bytes]:
        yield from ()


class Zlib:
    """gzip and deflate."""

    held = 0

    def __init__(self, window: int) -> None:
        self._decoder = zlib.decompressobj(wbits=window)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        try:
            while piece:
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


class Brotli:
    held = 0

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
    """Decoded when all of it is there: only so can its output be taken in steps."""

    def __init__(self) -> None:
        self._pieces = bytearray()  # bound: the cap on bodies, and the admission

    @property
    def held(self) -> int:
        return len(self._pieces)

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self._pieces += piece
        yield from ()

    def end(self) -> Iterator[bytes]:
        decoder = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
        try:
            with decoder.stream_reader(bytes(self._pieces)) as reader:
                while decoded := reader.read(STEP):
                    yield decoded  # of a frame that was cut: what there is, which is no JSON
        except zstandard.ZstdError as error:
            raise Garbled(str(error)) from None


DECODERS: dict[str, Callable[[], Decoder]] = {
    "identity": Identity,
    "gzip": lambda: Zlib(31),
    "x-gzip": lambda: Zlib(31),
    "deflate": lambda: Zlib(15),
    "br": Brotli,
    "zstd": Zstd,
}
