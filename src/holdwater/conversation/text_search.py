"""Searches the recorded exchanges of a run for a text, and builds the index that makes this fast.

Both are generators that do a little work for each step: they stop as soon as no further step is taken. One
record is in memory at a time, and of a large one only a piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..core.errors import HoldwaterError, LedgerCorrupt
from ..core.exchange import Exchange
from ..dialect import find_dialect
from ..dialect.message import CommonMessage, decode_referring
from ..ledger.exchanges import decode_exchange, segment_path
from ..ledger.reader import LedgerReader
from ..ledger.search import SearchHit, SearchPattern, TextExcerpt
from ..ledger.search_index import CHUNK, IndexUnusable, SearchIndex, find_index, open_index, remove_index
from ..ledger.segment import SegmentRecord, scan_bounded
from .trajectory import parse_reply

LARGEST = 1 << 20  # bytes of a record that is parsed; a larger one is searched as it is stored
MOST_PROBLEMS = 20
TurnPlace = tuple[int, int]  # an attempt and a turn: a search goes on after it
START: TurnPlace = (0, 0)
NUMBER = re.compile(rb'\{"number":(\d{1,18})')  # the first field of an exchange


class MatchingTurn(NamedTuple):
    """A turn with the text."""

    turn: int
    role: str
    excerpt: TextExcerpt


class TranscriptSearch:
    """A search of all attempts of a run, in the order in which they began."""

    def __init__(
        self,
        reader: LedgerReader,
        pattern: SearchPattern,
        after: TurnPlace = START,
        index: SearchIndex | None = None,
    ) -> None:
        self.attempts = 0  # that were searched
        self.bytes = 0  # of segments that were read
        self.problems: list[str] = []  # bound: MOST_PROBLEMS
        self._reader = reader
        self._pattern = pattern
        self._after = after
        self._index = index

    def find_hits(self) -> Iterator[SearchHit | None]:
        """Yield one hit for each turn with the text, and None after each other step."""
        if self._index is not None:
            self._select(self._index)
        for attempt, name, sample, number in list_attempts(self._reader, self._after[0]):
            for found in self._search_attempt(attempt):
                if found is None or (attempt, found.turn) <= self._after:
                    yield None
                else:
                    yield SearchHit(
                        "turn", name, sample, attempt, number, found.turn, found.role, *found.excerpt
                    )
            self.attempts += 1
            yield None

    def _search_attempt(self, attempt: int) -> Iterator[MatchingTurn | None]:
        path = segment_path(self._reader.directory, attempt)
        try:
            for start, stop in self._list_ranges(attempt, path.stat().st_size):
                for record in scan_bounded(path, LARGEST, start):
                    if record.at >= stop:
                        break
                    self.bytes += record.end - record.at
                    if record.content is None:
                        yield from self._search_pieces(record.read_pieces())
                    else:
                        yield self._search_exchange(attempt, record.content)
        except FileNotFoundError:
            return  # no call was recorded, or the files are dropped
        except LedgerCorrupt as error:
            self._report(error.message)

    def _search_exchange(self, attempt: int, content: bytes) -> MatchingTurn | None:
        if not self._pattern.may_match(content):
            return None
        exchange = decode_exchange(content, attempt)
        for role, text in list_texts(exchange):
            if (excerpt := self._pattern.find(text)) is not None:
                return MatchingTurn(exchange.number, role, excerpt)
        return None

    def _search_pieces(self, pieces: Iterator[bytes]) -> Iterator[MatchingTurn | None]:
        beginning = next(pieces, b"")
        number = NUMBER.match(beginning)
        for excerpt in self._pattern.scan_pieces(chain((beginning,), pieces)):
            yield MatchingTurn(int(number[1]) if number else 0, "", excerpt) if excerpt else None

    def _select(self, index: SearchIndex) -> None:
        try:
            if not index.select(self._pattern):
                self._index = None  # the text is too short
        except HoldwaterError as error:
            self._drop_index(error)

    def _list_ranges(self, attempt: int, size: int) -> list[tuple[int, int]]:
        if self._index is not None:
            try:
                return self._index.list_ranges(attempt, size)
            except HoldwaterError as error:
                self._drop_index(error)
        return [(0, size)]

    def _drop_index(self, error: HoldwaterError) -> None:
        self._index = None
        self._report(f"the index is not used: {error.message}")

    def _report(self, problem: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


@contextmanager
def open_search(
    reader: LedgerReader, pattern: SearchPattern, cache: Path, after: TurnPlace = START
) -> Iterator[TranscriptSearch]:
    """Open a search that uses the index of the run, if it has a usable one."""
    path = find_index(reader.directory, cache)
    if path is None:
        yield TranscriptSearch(reader, pattern, after)
        return
    try:
        index = SearchIndex(path, reader.config.id)
    except HoldwaterError as error:
        search = TranscriptSearch(reader, pattern, after)
        search.problems.append(f"the index is not used: {error.message}")
        yield search
        return
    with index:
        yield TranscriptSearch(reader, pattern, after, index)


class IndexProgress(NamedTuple):
    """How far the building of an index is."""

    attempts: int
    bytes: int  # of segments that were added
    note: str = ""


def build_index(reader: LedgerReader, cache: Path) -> Iterator[IndexProgress]:
    """Bring the index of a run up to date, or build it; yield the progress after each chunk and attempt."""
    for again in (True, False):
        index, reason = open_index(reader.directory, cache, reader.config.id)
        if reason:
            yield IndexProgress(0, 0, f"built anew: {reason}")
        try:
            with index:
                yield from _add_attempts(reader, index)
            return
        except IndexUnusable as error:
            if not again:
                raise
            remove_index(index.path)
            yield IndexProgress(0, 0, f"built anew: {error.message}")


def _add_attempts(reader: LedgerReader, index: SearchIndex) -> Iterator[IndexProgress]:
    size = 0
    for attempts, (attempt, *_) in enumerate(list_attempts(reader), 1):
        path = segment_path(reader.directory, attempt)
        try:
            before = index.find_end(attempt)
            if path.stat().st_size < before:
                raise IndexUnusable(f"the exchanges of attempt {attempt} have changed since")
            for at in _add_chunks(index, attempt, scan_bounded(path, LARGEST, before)):
                size += at - before
                before = at
                yield IndexProgress(attempts, size)
        except FileNotFoundError:
            pass  # no call was recorded, or the files are dropped
        except LedgerCorrupt as error:
            yield IndexProgress(attempts, size, error.message)
        yield IndexProgress(attempts, size)


def _add_chunks(index: SearchIndex, attempt: int, records: Iterator[SegmentRecord]) -> Iterator[int]:
    """Add records in chunks; yield the byte up to which they are added."""
    texts: list[str] = []  # bound: CHUNK characters, and one record
    size, start, stop = 0, -1, -1
    for record in records:
        if start >= 0 and (record.content is None or size >= CHUNK):
            index.add(attempt, (start, stop), texts)
            yield stop
            texts, size, start = [], 0, -1
        if record.content is None:
            index.add(attempt, (record.at, record.end), None)
            yield record.end
            continue
        start = record.at if start < 0 else start
        stop = record.end
        added = [text for _, text in list_texts(decode_exchange(record.content, attempt))]
        size += sum(map(len, added))
        texts += added
    if start >= 0:
        index.add(attempt, (start, stop), texts)
        yield stop


def list_attempts(reader: LedgerReader, first: int = 0) -> Iterator[tuple[int, str, int, int]]:
    """Yield row, instance, sample and number of the attempts in which an agent acted."""
    return reader.paged(_ATTEMPTS, (first - 1,))


def list_texts(exchange: Exchange) -> Iterator[tuple[str, str]]:
    """Yield role and text of all that an exchange says, a text at a time.

    A client that continues a conversation sends the last reply again: it was found in its own turn.
    """
    dialect = find_dialect(exchange.dialect)
    messages = list(dialect.parse_messages([decode_referring(bytes(raw)) for raw in exchange.append]))
    if exchange.parent is not None and messages and messages[0].role == "assistant":
        del messages[0]
    reply = parse_reply(exchange)
    for message in (*messages, *((reply.message,) if reply.message else ()), *reply.others):
        for text in _read_message(message):
            yield message.role, text
    if exchange.error:
        yield "error", exchange.error


def _read_message(message: CommonMessage) -> Iterator[str]:
    if message.reasoning:
        yield message.reasoning
    yield from (part for part in message.parts if isinstance(part, str))
    for call in message.calls:
        yield call.name
        for value in call.named_arguments.values():
            yield value if isinstance(value, str) else msgspec.json.encode(value).decode()


_ATTEMPTS = """
    SELECT a.id, i.name, a.sample, a.number FROM attempt a JOIN instance i ON i.id = a.instance
    WHERE a.id > ? AND a.regrades IS NULL ORDER BY a.id LIMIT ?
"""
