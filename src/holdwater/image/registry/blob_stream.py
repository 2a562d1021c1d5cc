"""Streams of blobs from and to a registry, checked against size and digest while they flow.

The last piece is held back until the digest is verified, so no reader receives all of a wrong blob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

import aiohttp

from .refusal import RegistryRefusal, mismatch_error, unreached_error

_PIECE = 256 * 1024  # bytes to read from a file at once


async def read_body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body; for a longer body, slightly more than its first `most` bytes."""
    body = b""
    while len(body) <= most and (piece := await response.content.readany()):
        body += piece
    return body


class BlobStream:
    """Iterates once over the pieces of a blob. `what` begins the message of an error."""

    def __init__(self, what: str, digest: str, size: int) -> None:
        self.failure: RegistryRefusal | None = None  # the error that ended the stream
        self.on_piece: Callable[[], None] = lambda: None  # called for each piece
        self._what = what
        self._digest = digest
        self._size = size
        self._count = 0
        self._hash = hashlib.new(digest.partition(":")[0])
        self._held = b""
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._ended:
            self.on_piece()
            try:
                piece = await self._read_checked()
            except RegistryRefusal as failure:
                self.failure = failure
                raise
            held, self._held = self._held, piece
            self._ended = not piece
            if held:
                return held
        raise StopAsyncIteration

    async def _read_checked(self) -> bytes:
        piece = await self._read()
        self._hash.update(piece)
        self._count += len(piece)
        if self._count > self._size or (not piece and self._count != self._size):
            raise mismatch_error(self._what, f"expected {self._size} bytes, got {self._count}")
        if not piece and f"{self._hash.name}:{self._hash.hexdigest()}" != self._digest:
            raise mismatch_error(self._what, f"the content does not match the digest `{self._digest}`")
        return piece

    async def _read(self) -> bytes:
        """Return the next bytes; empty at the end."""
        raise NotImplementedError


class DownloadStream(BlobStream):
    """The body of a registry's response."""

    def __init__(self, what: str, digest: str, size: int, response: aiohttp.ClientResponse) -> None:
        super().__init__(what, digest, size)
        self._content = response.content

    async def _read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            cause = type(error).__name__
        raise unreached_error(
            self._what, f"the download stopped after {self._count} of {self._size} bytes: {cause}"
        )


class FileStream(BlobStream):
    """A file from the offset `start`; the bytes before it only enter the digest. Used with `with`."""

    def __init__(self, what: str, digest: str, size: int, path: Path, start: int = 0) -> None:
        super().__init__(what, digest, size)
        self._path = path
        self._skip = start
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            self._raise_failure(error)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    async def __anext__(self) -> bytes:
        piece = await super().__anext__()
        while self._skip >= len(piece):
            self._skip -= len(piece)
            piece = await super().__anext__()
        piece, self._skip = piece[self._skip :], 0
        return piece

    async def _read(self) -> bytes:
        assert self._file is not None, "used outside `with`"
        try:
            return self._file.read(_PIECE)
        except OSError as error:
            self._raise_failure(error)
            raise

    def _raise_failure(self, error: OSError) -> None:
        raise RegistryRefusal(
            f"{self._what}: {self._path}: {error.strerror}", kind="layer", again=False
        ) from None
