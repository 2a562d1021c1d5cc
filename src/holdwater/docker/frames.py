"""Decodes the output of a command in a container: the daemon sends both streams as frames with a header.

Pure. The pieces come from `DockerClient.open_body`; `sandbox/docker/` uses the decoded output.
"""

from __future__ import annotations

from collections.abc import Iterator

HEADER_SIZE = 8  # bytes: stream number, three zeros, length in network order
STDERR = 2


class FrameDecoder:
    """Splits the byte stream into frames; content is passed on before its frame is complete."""

    def __init__(self) -> None:
        self._head = bytearray()  # at most `HEADER_SIZE` bytes
        self._left = 0  # bytes left of the current frame
        self._stream = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the stream number and the content of each part in `piece`."""
        at = 0
        while at < len(piece):
            if self._left == 0:
                taken = piece[at : at + HEADER_SIZE - len(self._head)]
                self._head += taken
                at += len(taken)
                if len(self._head) < HEADER_SIZE:
                    return
                self._stream, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
                self._head.clear()
                continue
            content = piece[at : at + self._left]
            at += len(content)
            self._left -= len(content)
            yield self._stream, content
