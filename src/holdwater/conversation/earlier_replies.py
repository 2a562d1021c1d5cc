"""Finds replies of earlier attempts by the request that they answered, so that a reply is paid for only once.

It holds a file offset for each reply, never the reply. The gateway identifies equal requests by
`Exchange.identity`. In a replay, `describe_drift` finds where a request differs from the recorded request
whose reply it received; parts that do not count for a request's identity do not count there either.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.errors import HoldwaterError, LedgerCorrupt
from ..core.exchange import (
    NO_CHANGES,
    DriftedCall,
    Exchange,
    HeadChanges,
    RecordedReply,
    RepeatedRequest,
)
from ..dialect import find_dialect
from ..dialect.interface import VOLATILE_KEYS
from ..dialect.message import decode_foreign
from ..ledger import segment
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.directory import RunDirectory
from ..ledger.exchanges import decode_exchange, segment_path
from .trajectory import ExchangeTree

ReplyKey = tuple[str, int]  # the dialect and number of messages of a request
MOST_PLACES = 8  # differences described per attempt
EXCERPT_LENGTH = 30  # characters shown from the first difference of two texts


class EarlierReplies:
    """Implements `core.exchange.ReplyRecording` over the complete replies of attempts at the same work."""

    def __init__(self, directory: RunDirectory, attempts: Iterable[int]) -> None:
        self._blobs = BlobStore(directory.blobs)
        # bound of both: the exchanges of the attempts
        self._by_identity: dict[str, deque[_ReplyLocation]] = {}
        self._by_length: dict[ReplyKey, deque[_ReplyLocation]] = {}
        for attempt in attempts:
            self._add(list(_find_locations(directory, attempt)))

    unrepeated = ""  # any part of the record may be used

    def take(self, request: RepeatedRequest) -> RecordedReply | None:
        """Return the next reply to the same request, each once and in order."""
        return self._take_first(self._by_identity.get(request.identity))

    def change_live(self, request: RepeatedRequest) -> HeadChanges:
        return NO_CHANGES

    def nearest(self, dialect: str, messages: int) -> RecordedReply | None:
        """Return a reply to a request with as many messages, of the last attempt that has one; each once."""
        found = self._take_first(self._by_length.get((dialect, messages)))
        return found and found._replace(drifted=True)

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
                    return load_reply(exchange, place.attempt, self._blobs)
                except LedgerCorrupt:
                    continue  # the model can be called again; `audit` reports the damage
        return None


def load_reply(exchange: Exchange, attempt: int, blobs: BlobStore) -> RecordedReply:
    """Return the reply of an exchange, media included."""
    reply = resolve_references(bytes(exchange.reply or b"null"), blobs)
    chunks = None if exchange.chunks is None else resolve_references(bytes(exchange.chunks), blobs)
    original = None if exchange.original is None else resolve_references(bytes(exchange.original), blobs)
    usage = exchange.usage.plus(exchange.saved)
    recorded = RecordedReply(reply, usage, exchange.version, chunks, attempt, exchange.number)
    return recorded._replace(original=original)


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


def describe_drift(
    directory: RunDirectory,
    recorded: RunDirectory,
    attempt: int,
    drifts: Sequence[DriftedCall],
    ignored: Collection[str] = (),
) -> str:
    """Describe how an attempt's requests differ from those of the run that it replays. Reads both runs.

    The keys `ignored` of the requests may differ.
    """
    try:
        now = ExchangeTree(directory, attempt)
        reader = RequestComparison(now, lambda before: ExchangeTree(recorded, before), ignored)
        return reader.describe(drifts)
    except HoldwaterError as error:
        return f"the requests cannot be compared: {error.message}"


class RequestDifference(NamedTuple):
    """The first difference of two requests."""

    place: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.place}: recorded `{self.recorded}`, now `{self.now}`"


class RequestComparison:
    """Compares the requests of two attempts, each read from its own exchanges."""

    def __init__(
        self, now: ExchangeTree, recorded: Callable[[int], ExchangeTree], ignored: Collection[str] = ()
    ) -> None:
        self._now = now
        self._recorded = recorded
        self._ignored = VOLATILE_KEYS.union(ignored)

    def describe(self, drifts: Sequence[DriftedCall]) -> str:
        """Describe where requests differ: each place once, with the requests whose first difference it is."""
        numbers = {self._now.exchange(number).identity: number for number in self._now.numbers()}
        places: dict[str, list[int]] = {}  # bound: the drifts that the gateway remembers
        for drift in drifts:
            number = numbers.get(drift.identity)
            if number is not None:
                found = self._compare(number, self._recorded(drift.attempt), drift.number)
                places.setdefault(str(found or "no difference is left in the record"), []).append(number)
        sentences = []
        for place, at in list(places.items())[:MOST_PLACES]:
            sentences.append(f"request{'s' * (len(at) > 1)} {', '.join(map(str, at))} at {place}")
        return "; ".join(sentences)

    def _compare(self, number: int, recorded: ExchangeTree, before: int) -> RequestDifference | None:
        pairs = zip_longest(self._messages(recorded, before), self._messages(self._now, number))
        for place, (then, now) in enumerate(pairs, 1):
            if then != now:
                return next(
                    _find_differences(
                        f"message {place}", decode_foreign(then or b""), decode_foreign(now or b"")
                    ),
                    None,
                )
        return next(_find_differences("", self._head(recorded, before), self._head(self._now, number)), None)

    def _messages(self, tree: ExchangeTree, number: int) -> Iterator[bytes]:
        for dialect, raw in tree.request(number):
            found = find_dialect(dialect)
            yield found.strip_generated(found.strip_transient(bytes(raw)))

    def _head(self, tree: ExchangeTree, number: int) -> dict[str, Any]:
        return {key: value for key, value in tree.head(number).items() if key not in self._ignored}


def _find_differences(place: str, then: Any, now: Any) -> Iterator[RequestDifference]:
    """Yield the places where two values differ, in order."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in then if key not in now)]:
            yield from _find_differences(f"{place} `{key}`".strip(), then.get(key), now.get(key))
    elif isinstance(then, list) and isinstance(now, list):
        for number, (a, b) in enumerate(zip_longest(then, now), 1):
            yield from _find_differences(f"{place} {number}".strip(), a, b)
    elif isinstance(then, str) and isinstance(now, str):
        if then != now:
            at = next((n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), None)
            at = min(len(then), len(now)) if at is None else at
            yield RequestDifference(
                f"{place} character {at + 1}", then[at : at + EXCERPT_LENGTH], now[at : at + EXCERPT_LENGTH]
            )
    elif then != now:
        yield RequestDifference(place, _render_value(then), _render_value(now))


def _render_value(value: Any) -> str:
    return "nothing" if value in (None, "") else msgspec.json.encode(value).decode()[:EXCERPT_LENGTH]
