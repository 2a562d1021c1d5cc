"""The replies of earlier attempts, found by the request that they answered: what is paid for is paid once.

It holds a place in a file for each reply, never the reply. Which requests are the same is said by the gateway
in `Exchange.identity`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..core.authoring import Recorded
from ..core.errors import LedgerCorrupt
from ..core.records import Exchange
from . import segment
from .blobs import Blobs
from .directory import RunDirectory
from .exchanges import decode, segment_path
from .media import resolve

Turn = tuple[str, int]  # dialect, and how many messages the request has


class EarlierReplies:
    """Implements `core.authoring.Recording` over whole replies of `attempts`, which all tried the same."""

    def __init__(self, directory: RunDirectory, attempts: Iterable[int]) -> None:
        self._blobs = Blobs(directory.blobs)
        self._same: dict[str, deque[_Place]] = {}  # bound: the exchanges of those attempts, like the next
        self._alike: dict[Turn, deque[_Place]] = {}
        for attempt in attempts:
            self._add(list(_places(directory, attempt)))

    def take(self, identity: str) -> Recorded | None:
        """The reply to the same request, each once and in their order."""
        return self._first(self._same.get(identity))

    def nearest(self, dialect: str, messages: int) -> Recorded | None:
        """A reply to a request of as many messages, of the last attempt that has one: each once."""
        return self._first(self._alike.get((dialect, messages)))

    def _add(self, places: list[_Place]) -> None:
        """A later attempt repeats what it was given of an earlier one: of each request, who got further."""
        same: dict[str, deque[_Place]] = {}
        alike: dict[Turn, deque[_Place]] = {}
        for place in places:
            same.setdefault(place.identity, deque()).append(place)
            alike.setdefault(place.turn, deque()).append(place)
        for identity, found in same.items():
            if len(found) >= len(self._same.get(identity, ())):
                self._same[identity] = found
        self._alike.update(alike)

    def _first(self, places: deque[_Place] | None) -> Recorded | None:
        while places:
            place = places.popleft()
            if not place.taken:
                place.taken = True
                try:
                    exchange = decode(segment.read_at(place.path, place.at), place.attempt)
                    return self._read(exchange, place.attempt)
                except LedgerCorrupt:
                    continue  # it can be had again; `audit` names the damage
        return None

    def _read(self, exchange: Exchange, attempt: int) -> Recorded:
        reply = resolve(bytes(exchange.reply or b"null"), self._blobs)
        chunks = None if exchange.chunks is None else resolve(bytes(exchange.chunks), self._blobs)
        usage = exchange.usage.plus(exchange.saved)
        return Recorded(reply, usage, exchange.version, chunks, attempt, exchange.number)


class _Place:
    """Where a reply stands."""

    __slots__ = ("at", "attempt", "identity", "path", "taken", "turn")

    def __init__(self, attempt: int, path: Path, at: int, exchange: Exchange) -> None:
        self.attempt = attempt
        self.path = path
        self.at = at
        self.identity = exchange.identity
        self.turn: Turn = (exchange.dialect, exchange.keep + len(exchange.append))
        self.taken = False


def _places(directory: RunDirectory, attempt: int) -> Iterator[_Place]:
    path = segment_path(directory, attempt)
    if not path.exists():
        return
    try:
        for at, content in segment.places(path):
            exchange = decode(content, attempt)
            whole = exchange.status == 200 and not exchange.error and exchange.reply is not None
            if whole and exchange.identity:
                yield _Place(attempt, path, at, exchange)
    except LedgerCorrupt:
        return  # what stands before the damage is good; `audit` names it
