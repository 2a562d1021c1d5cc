"""What a command in a container prints, as the daemon sends it: pieces of both streams, each with a head.

Pure. The pieces come from `DockerClient.reading`; what becomes of them is decided in `sandbox/docker/`.
"""

from __future__ import annotations

from collections.abc import Iterator

HEAD = 8  # bytes: which stream, three zeros, the length in network order
STDERR = 2


class Frames:
    """Takes the stream apart as it comes; a frame's content is given on before it is whole."""

    def __init__(self) -> None:
        self._head = bytearray()  # at most `HEAD` bytes
        self._left = 0  # of the current frame
        self._stream = 0

    def feed(self, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Which stream, and what was printed there."""
        at = 0
        while at < len(piece):
            if self._left == 0:
                taken = piece[at : at + HEAD - len(self._head)]
                self._head += taken
                at += len(taken)
                if len(self._head) < HEAD:
                    return
                self._stream, self._left = self._head[0], int.from_bytes(self._head[4:], "big")
                self._head.clear()
                continue
            content = piece[at : at + self._left]
            at += len(content)
            self._left -= len(content)
            yield self._stream, content
