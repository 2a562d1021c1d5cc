"""Searches the conversation of an attempt for a text, turn by turn, in bounded time and memory.

A turn is searched in the form in which pages show it. The rest of a long text, which they cut, is read in
pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from time import monotonic
from typing import NamedTuple

from ..dialect.message import CommonMessage
from .exchange_tree import ExchangeThread, ExchangeTree
from .long_texts import CUT, ShortRecords
from .request_changes import render_plain
from .trajectory import Turn, read_thread_turns

MOST_HITS = 50  # of one page
MOST_IN_TURN = 3
AROUND = 80  # characters that are shown around a hit
_PLAIN = re.compile(r"[ !#-.0-\[\]-~]+")  # the same in JSON as in the text


class TranscriptHit(NamedTuple):
    """A place that has the text."""

    number: int  # of the exchange
    anchor: str  # of the message on the page of its turn
    role: str
    before: str
    found: str
    after: str
    folded: bool = False  # it is in the part of a long text that pages do not show


def search_turns(
    tree: ExchangeTree, query: str, after: int, *, deadline: float
) -> tuple[list[TranscriptHit], int | None]:
    """Return hits in the turns after number `after`, and the number after which the search continues."""
    pattern = re.compile(re.escape(query), re.IGNORECASE)
    needle = query.lower().encode() if query.isascii() and _PLAIN.fullmatch(query) else None
    hits: list[TranscriptHit] = []
    for number in tree.numbers():
        if number <= after:
            continue
        raw = tree.read_raw(number)
        folded = _search_folded(tree, number, raw, query)
        if needle is None or needle in raw.lower():
            turn = next(read_thread_turns(tree, ExchangeThread(0, (number,))))
            hits += islice(_search_turn(turn, pattern), MOST_IN_TURN)
        hits += islice(folded, 1)
        if len(hits) >= MOST_HITS or monotonic() > deadline:
            return hits, number
    return hits, None


def _search_turn(turn: Turn, pattern: re.Pattern[str]) -> Iterator[TranscriptHit]:
    for anchor, message in list_anchors(turn):
        text = CUT.sub(
            "", f"{message.tool}\n{render_plain(message)}" if message.tool else render_plain(message)
        )
        if match := pattern.search(text):
            yield _make_hit(turn.number, anchor, message.role, text, match)


def list_anchors(turn: Turn) -> Iterator[tuple[str, CommonMessage]]:
    """Yield the messages of a turn, each with its name on the page."""
    for place, message in enumerate(turn.new, 1):
        yield f"turn-{turn.number}-{place}", message
    if turn.reply is not None:
        yield f"turn-{turn.number}-0", turn.reply
    for place, message in enumerate(turn.others, 2):
        yield f"turn-{turn.number}-c{place}", message


def _search_folded(tree: ExchangeTree, number: int, raw: bytes, query: str) -> Iterator[TranscriptHit]:
    records, needle = tree.records, query.lower()
    pattern = re.compile(re.escape(query), re.IGNORECASE)
    if not isinstance(records, ShortRecords):
        return
    for name in records.list_names(raw):
        end = ""
        for piece in records.read_text(name, rest=True):
            text = end + piece
            if needle in text.lower() and (match := pattern.search(text)):  # the pattern alone is slow
                yield _make_hit(number, f"turn-{number}", "long text", text, match)._replace(folded=True)
                break
            end = text[-2 * AROUND - len(query) :]


def _make_hit(number: int, anchor: str, role: str, text: str, match: re.Match[str]) -> TranscriptHit:
    before, after = text[max(0, match.start() - AROUND) : match.start()], text[match.end() :][:AROUND]
    return TranscriptHit(number, anchor, role, before, match[0], after)
