"""Keeps the requests of a protocol that are not answered yet, each in a file.

A server that starts again finds them and places their orders once more: the protocol's clients never resend.
The files also keep the tasks of waiting rollouts out of memory. A file that a power cut has torn is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

DIGITS = 32  # of the name of a file


class RequestSpool:
    """The unanswered requests below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for torn in self._directory.glob("*.new"):
            torn.unlink()

    def save(self, request_id: bytes, payload: bytes) -> None:
        """Write a request so that it survives kill -9."""
        path = self._find(request_id)
        new = path.with_suffix(".new")
        new.write_bytes(len(request_id).to_bytes(4, "big") + request_id + payload)
        new.rename(path)

    def load(self, request_id: bytes) -> bytes:
        return _split(self._find(request_id).read_bytes())[1]

    def remove(self, request_id: bytes) -> None:
        self._find(request_id).unlink(missing_ok=True)

    def list_requests(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield id and payload of each request, one in memory at a time."""
        for path in sorted(self._directory.glob("*.request")):
            request_id, payload = _split(path.read_bytes())
            if path == self._find(request_id):
                yield request_id, payload

    def _find(self, request_id: bytes) -> Path:
        """Return the file of a request. A client chooses the id, so it is never a part of a path."""
        return self._directory / f"{blake3(request_id).hexdigest()[:DIGITS]}.request"


def _split(content: bytes) -> tuple[bytes, bytes]:
    end = 4 + int.from_bytes(content[:4], "big")
    return content[4:end], content[end:]
