"""Finds replies of earlier attempts by the request that they answered, so that a reply is paid for only once.

It holds a file offset for each reply, never the reply. The gateway identifies equal requests by
`Exchange.identity`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..core.errors import LedgerCorrupt
from ..core.exchange import Exchange, RecordedReply
from ..ledger import segment
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import decode_exchange, segment_path

ReplyKey = tuple[str, int]  # the dialect and number of messages of a request


class EarlierReplies:
    """Implements `core.exchange.ReplyRecording` over the complete replies of attempts at the same work."""

    def __init__(self, directory: RunDirectory, attempts: Iterable[int]) -> None:
        self._blobs = BlobStore(directory.blobs)
        # bound of both: the exchanges of the attempts
        self._by_identity: dict[str, deque[_ReplyLocation]] = {}
        self._by_length: dict[ReplyKey, deque[_ReplyLocation]] = {}
        for attempt in attempts:
            self._add(list(_find_locations(directory, attempt)))

    def take(self, identity: str) -> RecordedReply | None:
        """Return the next reply to the same request, each once and in order."""
        return self._take_first(self._by_identity.get(identity))

    def nearest(self, dialect: str, messages: int) -> RecordedReply | None:
        """Return a reply to a request with as many messages, of the last attempt that has one; each once."""
        return self._take_first(self._by_length.get((dialect, messages)))

    def _add(self, places: list[_ReplyLocation]) -> None:
        """Add the replies of an attempt.

        A later attempt repeats replies that it received from an earlier one: for each request, the attempt
        with more replies counts.
        """
        same: dict[str, deque[_ReplyLocation]] = {}
        alike: dict[ReplyKey, deque[_ReplyLocation]] = {}
        for place in places:
            same.setdefault(place.identity, deque()).append(place)
            alike.setdefault(place.turn, deque()).append(place)
        for identity, found in same.items():
            if len(found) >= len(self._by_identity.get(identity, ())):
                self._by_identity[identity] = found
        self._by_length.update(alike)

    def _take_first(self, places: deque[_ReplyLocation] | None) -> RecordedReply | None:
        while places:
            place = places.popleft()
            if not place.taken:
                place.taken = True
                try:
                    exchange = decode_exchange(segment.read_record(place.path, place.at), place.attempt)
                    return self._load_reply(exchange, place.attempt)
                except LedgerCorrupt:
                    continue  # the model can be called again; `audit` reports the damage
        return None

    def _load_reply(self, exchange: Exchange, attempt: int) -> RecordedReply:
        reply = resolve_references(bytes(exchange.reply or b"null"), self._blobs)
        chunks = None if exchange.chunks is None else resolve_references(bytes(exchange.chunks), self._blobs)
        usage = exchange.usage.plus(exchange.saved)
        return RecordedReply(reply, usage, exchange.version, chunks, attempt, exchange.number)


class _ReplyLocation:
    """The position of a reply in a segment."""

    __slots__ = ("at", "attempt", "identity", "path", "taken", "turn")

    def __init__(self, attempt: int, path: Path, at: int, exchange: Exchange) -> None:
        self.attempt = attempt
        self.path = path
        self.at = at
        self.identity = exchange.identity
        self.turn: ReplyKey = (exchange.dialect, exchange.keep + len(exchange.append))
        self.taken = False


def _find_locations(directory: RunDirectory, attempt: int) -> Iterator[_ReplyLocation]:
    path = segment_path(directory, attempt)
    if not path.exists():
        return
    try:
        for at, content in segment.read_with_offsets(path):
            exchange = decode_exchange(content, attempt)
            if exchange.complete and exchange.identity:
                yield _ReplyLocation(attempt, path, at, exchange)
    except LedgerCorrupt:
        return  # the replies before the damage are good; `audit` reports it
