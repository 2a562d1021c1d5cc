"""Decides what a search matches, and searches the rows of a ledger: names, failures, grades, answers.

`search_index.py` narrows a search of transcripts down; `conversation/text_search.py` reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ..core.errors import BadInput
from ..core.records import Record
from .reader import LedgerReader
from .schema import ANSWER_VERSION, FIGURES_VERSION

LONGEST_PATTERN = 200  # characters
CONTEXT = 100  # characters that are shown before and after a match
GRAM = 3  # characters of the parts of a text by which an index finds it
MOST_GRAMS = 24
ROWS = 10  # of each kind, for each run: a filtered list of instances shows all
# JSON encoders write any character as an escape, but hardly ever those that need none.
UNUSUAL_ESCAPE = re.compile(rb"\\u00[2-7]")
ESCAPED_CHARACTERS = re.compile(r'["\\/]|[^\x20-\x7e]')


class TextExcerpt(NamedTuple):
    """A match and the text around it."""

    before: str
    match: str
    after: str


class SearchHit(Record, frozen=True):
    """A place where the text was found."""

    kind: str  # `name`, `failure`, `grade`, `answer` or `turn`
    instance: str
    sample: int = 0
    attempt: int | None = None  # its row
    number: int | None = None  # of the attempt within its sample
    turn: int | None = None
    role: str = ""  # of the message in a turn; empty: unknown, the record is too large to be parsed
    before: str = ""
    match: str = ""
    after: str = ""


class SearchPattern:
    """A text that is searched for. Case does not matter for the letters A to Z."""

    def __init__(self, text: str) -> None:
        if not text.strip():
            raise BadInput("the text to search for is empty")
        if len(text) > LONGEST_PATTERN:
            raise BadInput(f"the text to search for has {len(text)} characters, at most {LONGEST_PATTERN}")
        self.text = text
        self._expression = re.compile(re.escape(text), re.IGNORECASE | re.ASCII)
        plain = max(ESCAPED_CHARACTERS.split(text), key=len)
        self._plain = plain.lower().encode()  # the longest part that JSON leaves as it is
        forms = {json.dumps(text, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
        self._forms = [form.encode(errors="replace").lower() for form in forms]

    def find(self, text: str) -> TextExcerpt | None:
        """Return the first match."""
        found = self._expression.search(text)
        return None if found is None else cut_excerpt(text, *found.span())

    def may_match(self, record: bytes) -> bool:
        """Return whether a record of raw JSON may contain the text; False is certain."""
        lowered = record.lower()
        return not self._plain or self._plain in lowered or UNUSUAL_ESCAPE.search(lowered) is not None

    def scan_pieces(self, pieces: Iterator[bytes]) -> Iterator[TextExcerpt | None]:
        """Search raw JSON of any size; yield None for each piece before the match, and then the match."""
        overlap = max(map(len, self._forms)) + CONTEXT
        kept = b""
        for piece in pieces:
            window = kept + piece
            lowered = window.lower()
            for form in self._forms:
                at = lowered.find(form)
                if at >= 0:
                    before, match = window[max(0, at - CONTEXT) : at], window[at : at + len(form)]
                    parts = (before, match, window[at + len(form) :][:CONTEXT])
                    yield TextExcerpt(*(part.decode(errors="replace") for part in parts))
                    return
            kept = window[-overlap:]
            yield None

    def list_grams(self) -> list[str]:
        """Return parts of the text that every text with a match contains; none: it is too short."""
        places = range(len(self.text) - GRAM + 1)
        grams = dict.fromkeys(self.text[at : at + GRAM].lower() for at in places)
        usable = [gram for gram in grams if gram.isascii() and gram.isprintable()]
        return usable[:: -(-len(usable) // MOST_GRAMS) or 1]


def cut_excerpt(text: str, start: int, end: int) -> TextExcerpt:
    return TextExcerpt(text[max(0, start - CONTEXT) : start], text[start:end], text[end : end + CONTEXT])


def find_rows(reader: LedgerReader, pattern: SearchPattern, most: int = ROWS) -> Iterator[SearchHit]:
    """Yield the first names of instances, failures, grades and answers with the text, each kind bounded."""
    text = pattern.text
    for (name,) in reader.rows(
        "SELECT name FROM instance WHERE instr(lower(name), lower(?)) > 0 ORDER BY id LIMIT ?", (text, most)
    ):
        yield _make_hit(pattern, "name", name, name)
    if reader.version >= FIGURES_VERSION:
        yield from _find_attempts(reader, pattern, "message", most)
    if reader.version >= ANSWER_VERSION:
        yield from _find_attempts(reader, pattern, "answer", most)


def _find_attempts(
    reader: LedgerReader, pattern: SearchPattern, column: str, most: int
) -> Iterator[SearchHit]:
    query = (
        f"SELECT i.name, a.sample, a.id, a.number, a.{column}, a.place FROM attempt a"
        f" JOIN instance i ON i.id = a.instance WHERE instr(lower(a.{column}), lower(?)) > 0"
        " ORDER BY a.id LIMIT ?"
    )
    for name, sample, attempt, number, text, place in reader.rows(query, (pattern.text, most)):
        kind = "answer" if column == "answer" else "failure" if place else "grade"
        yield _make_hit(pattern, kind, text, name, sample, attempt, number)


def _make_hit(
    pattern: SearchPattern,
    kind: str,
    text: str,
    instance: str,
    sample: int = 0,
    attempt: int | None = None,
    number: int | None = None,
) -> SearchHit:
    excerpt = pattern.find(text) or TextExcerpt(text[:CONTEXT], "", "")
    return SearchHit(kind, instance, sample, attempt, number, None, "", *excerpt)
