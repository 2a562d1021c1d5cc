"""Reads the records of an attempt with their long texts cut off, so that no page holds a message of 50 MB.

A cut text ends with a mark that names the rest. The rest is read in pieces: decoded for people, or as it is
stored. `trajectory.py` reads records in full, unless it is given a `ShortRecords`.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import msgspec
from blake3 import blake3

from ..core.errors import BadInput
from ..ledger.blobs import BlobStore, resolve_references
from ..ledger.segment import SegmentRecord, scan_bounded

LONGEST_TEXT = 64 * 1024  # bytes of a text, as JSON, that stay
LARGEST_RECORD = 1 << 20  # bytes of a cut record; above it, shorter texts are cut as well
SHORTER = 16  # each time by this factor
SHORTEST_TEXT = 256
PIECE = 128 * 1024
LONGEST_ESCAPE = 6
MOST_CACHED = 2 << 20  # bytes of cut records that are kept
CUT_MARK = secrets.token_hex(12)  # random: no foreign text can contain it
CUT = re.compile(rf"{CUT_MARK}:([0-9a-f]{{32}}):(\d+);")
_RAW_CUT = re.compile(CUT.pattern.encode())
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
_WHOLE_ESCAPES = re.compile(rb"(?:[^\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+", re.DOTALL)
_STRING = msgspec.json.Decoder(str)


class TextPlace(NamedTuple):
    """A long JSON string: the record or the blob that has it, and its bytes there without the quotes."""

    source: int | str  # the byte where the record begins, or the hash of a blob
    start: int
    end: int
    kept: int  # bytes before the cut


class CutText(NamedTuple):
    """The part of a text that is shown, and the name of the whole text."""

    text: str
    name: str = ""  # empty: it is not cut
    size: int = 0  # bytes of the whole text as JSON


def split_cuts(text: str) -> Iterator[CutText]:
    """Yield the parts of a text from cut records, each with the name of its whole text if it is cut."""
    done = 0
    for match in CUT.finditer(text):
        yield CutText(text[done : match.start()], match[1], int(match[2]))
        done = match.end()
    if done < len(text) or not done:
        yield CutText(text[done:])


class ShortRecords:
    """The records of one segment with their long texts cut off; several threads may share it."""

    def __init__(self, path: Path, blobs: BlobStore) -> None:
        self._path = path
        self._blobs = blobs
        self._places: dict[str, TextPlace] = {}  # bound: the long texts of one attempt
        self._cache: OrderedDict[int | str, bytes] = OrderedDict()  # bound: MOST_CACHED bytes
        self._cached = 0
        self._lock = Lock()

    def scan(self, at: int) -> Iterator[SegmentRecord]:
        """Yield the records from byte `at` on."""
        if self._path.exists():
            for record in scan_bounded(self._path, LONGEST_TEXT, at):
                yield record if record.content is not None else record._replace(content=self.read(record.at))

    def read(self, at: int) -> bytes:
        """Return the record that begins at byte `at`."""
        with self._lock:
            if at in self._cache:
                self._cache.move_to_end(at)
                return self._cache[at]
        record = next(scan_bounded(self._path, LONGEST_TEXT, at), None)
        return record.content if record is not None and record.content is not None else self._shorten(at)

    def resolve(self, raw: bytes) -> bytes:
        """Return JSON with its references replaced by media, and by constants with their long texts cut."""
        return resolve_references(raw, self._blobs, self._read_constant)

    def read_text(self, name: str, *, rest: bool = False) -> Iterator[str]:
        """Yield a whole text, decoded; or the rest after its cut."""
        place, left = self._find(name), b""
        for piece in self._read_stored(place, place.kept if rest else 0):
            joined = left + piece
            end = _find_whole_end(joined)
            left = joined[end:]
            yield _decode_string(joined[:end])
        if left:
            yield _decode_string(left)

    def write_whole(self, raw: bytes) -> Iterator[bytes]:
        """Yield JSON with the rest of each cut text in place of its mark."""
        done = 0
        for match in _RAW_CUT.finditer(raw):
            yield raw[done : match.start()]
            place = self._find(match[1].decode())
            yield from self._read_stored(place, place.kept)
            done = match.end()
        yield raw[done:]

    def list_names(self, raw: bytes) -> Iterator[str]:
        """Yield the names of the texts that are cut in a record."""
        return (match[1].decode() for match in _RAW_CUT.finditer(raw))

    def _find(self, name: str) -> TextPlace:
        if name not in self._places:
            raise BadInput("the attempt has no such text")
        return self._places[name]

    def _read_constant(self, name: str) -> bytes:
        with self._lock:
            if name in self._cache:
                return self._cache[name]
        return self._shorten(name)

    def _shorten(self, source: int | str) -> bytes:
        """Return a record or a constant with its long texts cut, and remember where these are."""
        most = LONGEST_TEXT
        while True:
            cutter = TextCutter(source, most)
            content = b"".join(cutter.cut(self._read_pieces(source)))
            if len(content) <= LARGEST_RECORD or most <= SHORTEST_TEXT:
                break
            most //= SHORTER
        self._places.update(cutter.places)
        with self._lock:
            self._cached += len(content) - len(self._cache.pop(source, b""))
            self._cache[source] = content
            while self._cached > MOST_CACHED and len(self._cache) > 1:
                self._cached -= len(self._cache.popitem(last=False)[1])
        return content

    def _read_pieces(self, source: int | str) -> Iterator[bytes]:
        if isinstance(source, str):
            yield from self._blobs.read_pieces(source, PIECE)
            return
        for record in scan_bounded(self._path, 0, source):
            yield from record.read_pieces()
            return

    def _read_stored(self, place: TextPlace, skip: int) -> Iterator[bytes]:
        """Yield the bytes of a long text from byte `skip` of it on, as they are stored."""
        at, start = 0, place.start + skip
        for piece in self._read_pieces(place.source):
            if at + len(piece) > start:
                yield piece[max(0, start - at) : place.end - at]
            at += len(piece)
            if at >= place.end:
                return


class TextCutter:
    """Copies JSON in one pass and cuts the strings that are longer than `most` bytes."""

    def __init__(self, source: int | str, most: int) -> None:
        self.places: dict[str, TextPlace] = {}
        self._source = source
        self._most = most
        self._inside = False  # a string
        self._escaped = False  # the next byte belongs to an escape
        self._text = bytearray()  # the beginning of the string; bound: `most` and a piece
        self._start = self._size = 0  # of the string
        self._digest = blake3()

    def cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the JSON in pieces with its long strings cut."""
        base = 0
        for piece in pieces:
            at = 0
            while at < len(piece):
                if not self._inside:
                    quote = piece.find(b'"', at)
                    end = quote + 1 if quote >= 0 else len(piece)
                    yield piece[at:end]
                    if quote >= 0:
                        self._open(base + end)
                else:
                    quote = self._find_quote(piece, at)
                    end = quote if quote >= 0 else len(piece)
                    self._add(piece[at:end])
                    if quote >= 0:
                        yield self._close()
                        end += 1
                at = end
            base += len(piece)

    def _open(self, start: int) -> None:
        self._inside, self._escaped = True, False
        self._start, self._size = start, 0

    def _add(self, content: bytes) -> None:
        if self._size <= self._most < self._size + len(content):  # it is long from here on
            self._digest = blake3(self._text)
        if self._size + len(content) > self._most:
            self._digest.update(content)
        if self._size <= self._most:
            self._text += content
        self._size += len(content)

    def _close(self) -> bytes:
        self._inside = False
        text, self._text = bytes(self._text), bytearray()
        if self._size <= self._most:
            return text + b'"'
        kept = text[: _find_whole_end(text[: self._most])]
        name = self._digest.hexdigest()[:32]
        self.places[name] = TextPlace(self._source, self._start, self._start + self._size, len(kept))
        return kept + f'{CUT_MARK}:{name}:{self._size};"'.encode()

    def _find_quote(self, piece: bytes, at: int) -> int:
        """Return the position of the quote that ends the string, or -1; remember an escape that is open."""
        start = at + 1 if self._escaped else at
        first = start
        while (quote := piece.find(b'"', first)) >= 0:
            if not _count_backslashes(piece, start, quote) % 2:
                return quote
            first = quote + 1
        self._escaped = bool(_count_backslashes(piece, start, len(piece)) % 2)
        return -1


def _count_backslashes(piece: bytes, start: int, end: int) -> int:
    """Return the number of backslashes just before `end`, from `start` on at most."""
    at = end
    while at > start and piece[at - 1] == 0x5C:
        at -= 1
    return end - at


def _find_whole_end(text: bytes) -> int:
    """Return the end of the last complete character of a JSON string that is cut off anywhere."""
    escapes = _WHOLE_ESCAPES.match(text)
    end = escapes.end() if escapes is not None else 0
    if len(text) - end > LONGEST_ESCAPE:
        end = len(text)  # the escape is not valid, now or later
    if high := _HIGH_SURROGATE.search(text[max(0, end - 6) : end]):
        end -= len(high[0])
    start = end
    while start > max(0, end - 4) and text[start - 1] & 0xC0 == 0x80:
        start -= 1
    if start > 0 and text[start - 1] >= 0xC0:
        length = 2 if text[start - 1] < 0xE0 else 3 if text[start - 1] < 0xF0 else 4
        if end - start + 1 < length:
            return start - 1
    return end


def _decode_string(content: bytes) -> str:
    """Decode the inside of a JSON string; content that is not valid stays as it is."""
    try:
        return _STRING.decode(b'"' + content + b'"')
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return content.decode("utf-8", "replace")
