"""Bytes on their way, checked as they go: what comes from a registry, and what is sent to one.

The last piece is held back until the digest is known to be right, so nobody is given all of a wrong blob.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Self

import aiohttp

from .refusal import Refusal, mismatch, unreached

_PIECE = 256 * 1024  # bytes of a file that are read at once


async def whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body; `most` bytes and a few of it where it has more."""
    body = b""
    while len(body) <= most and (piece := await response.content.readany()):
        body += piece
    return body


class Flow:
    """An iterator over pieces, once. `what` begins the message when it breaks off or is wrong."""

    def __init__(self, what: str, digest: str, size: int) -> None:
        self.failure: Refusal | None = None  # why it broke off
        self.beat: Callable[[], None] = lambda: None  # called with each piece
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
            self.beat()
            try:
                piece = await self._checked()
            except Refusal as failure:
                self.failure = failure
                raise
            held, self._held = self._held, piece
            self._ended = not piece
            if held:
                return held
        raise StopAsyncIteration

    async def _checked(self) -> bytes:
        piece = await self._read()
        self._hash.update(piece)
        self._count += len(piece)
        if self._count > self._size or (not piece and self._count != self._size):
            raise mismatch(self._what, f"it has not {self._size} bytes, as it should, but {self._count}")
        if not piece and f"{self._hash.name}:{self._hash.hexdigest()}" != self._digest:
            raise mismatch(self._what, f"what came is not what `{self._digest}` stands for")
        return piece

    async def _read(self) -> bytes:
        """The next bytes; none at the end."""
        raise NotImplementedError


class Incoming(Flow):
    """The body of a registry's answer."""

    def __init__(self, what: str, digest: str, size: int, response: aiohttp.ClientResponse) -> None:
        super().__init__(what, digest, size)
        self._content = response.content

    async def _read(self) -> bytes:
        try:
            return await self._content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            cause = type(error).__name__
        raise unreached(self._what, f"it broke off after {self._count} of {self._size} bytes: {cause}")


class OfFile(Flow):
    """A file from `start` on; what lies before it is read for the digest alone. Used with `with`."""

    def __init__(self, what: str, digest: str, size: int, path: Path, start: int = 0) -> None:
        super().__init__(what, digest, size)
        self._path = path
        self._skip = start
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            self._lost(error)
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
            self._lost(error)
            raise

    def _lost(self, error: OSError) -> None:
        raise Refusal(f"{self._what}: {self._path}: {error.strerror}", kind="layer", again=False) from None
