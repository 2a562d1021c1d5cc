"""The conversation of an attempt, a window of turns at a time.

The tree of an attempt holds a few numbers for each exchange; only the turns of the window are read from disk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from threading import Lock
from typing import Any

from ..conversation.trajectory import (
    ExchangeThread,
    ExchangeTree,
    Turn,
    open_conversation,
    read_thread_turns,
    render_raw_turn,
)
from ..core.errors import BadInput
from ..ledger.blobs import BlobStore, is_hash
from ..ledger.exchanges import segment_path
from ..ledger.reader import LedgerReader
from .instance_pages import find_attempt_row
from .page import JSON, LONGEST_TEXT, OCTETS, PageRequest, PageResponse, render_page

WINDOW = 20  # turns
MOST_TREES = 4
IMAGES = (
    "image/png",
    "image/jpeg",
    "image/gif",
    "image/webp",
)  # types without scripts


def show_transcript(asked: PageRequest) -> PageResponse:
    attempt = asked.read_part("attempt")
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, attempt)
        threads = tree.threads()
        thread = _choose_thread(threads, asked)
        start = _find_start(thread, asked)
        turns = read_window(tree, thread, start)
        row = find_attempt_row(reader, attempt)
        recorded = reader.whole_verdict(attempt).exchanges
    values = _describe_window(asked, thread, start, turns)
    lost = max(0, recorded - len(tree))
    return render_page("transcript.html", threads=threads, row=row, lost=lost, **values)


def show_turns(asked: PageRequest) -> PageResponse:
    """Return the next window: the page loads it when it is scrolled to."""
    attempt = asked.read_part("attempt")
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, attempt)
        thread = _choose_thread(tree.threads(), asked)
        start = _find_start(thread, asked)
        turns = read_window(tree, thread, start)
    return render_page("turns.html", **_describe_window(asked, thread, start, turns))


def _describe_window(
    asked: PageRequest, thread: ExchangeThread, start: int, turns: list[Turn]
) -> dict[str, Any]:
    return {
        "asked": asked,
        "run": asked.run,
        "attempt": asked.read_part("attempt"),
        "thread": thread,
        "start": start,
        "turns": turns,
        "following": start + WINDOW < len(thread.numbers),
        "window": WINDOW,
        **describe_messages(),
    }


def describe_messages() -> dict[str, Any]:
    """Return the values that every template with messages needs."""
    return {"longest": LONGEST_TEXT, "images": IMAGES}


def show_raw_turn(asked: PageRequest) -> PageResponse:
    """Return request and reply of a turn as they were sent and received."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
        body = b"".join(render_raw_turn(tree, asked.read_number("turn")))
    return PageResponse(body, JSON)


def send_blob(asked: PageRequest) -> PageResponse:
    """Send an image of a conversation; anything else is a download."""
    with asked.pool.open(asked.run) as reader:
        name = asked.parts["blob"]
        if not is_hash(name):
            raise BadInput("no such medium")
        body = BlobStore(reader.directory.blobs).get(name)
    kind = asked.query.get("type", "")
    return PageResponse(body, kind if kind in IMAGES else OCTETS, charset=None)


def find_place(asked: PageRequest) -> int:
    """Return the place in the thread at which the window of an address begins."""
    with asked.pool.open(asked.run) as reader:
        threads = open_tree(reader, asked.read_part("attempt")).threads()
    return _find_start(_choose_thread(threads, asked), asked)


def read_window(tree: ExchangeTree, thread: ExchangeThread, start: int) -> list[Turn]:
    """Return the turns of a window; the exchange before it is read for its reply alone."""
    numbers = thread.numbers[max(0, start - 1) : start + WINDOW]
    turns = read_thread_turns(tree, ExchangeThread(thread.place, numbers))
    return list(islice(turns, 1 if start else 0, None))


def open_tree(reader: LedgerReader, attempt: int) -> ExchangeTree:
    """Return the conversation of an attempt; one that has not grown is not read again."""
    find_attempt_row(reader, attempt)
    path = segment_path(reader.directory, reader.acting_attempt(attempt))
    size = path.stat().st_size if path.exists() else 0
    return _trees.get((str(path), size), lambda: open_conversation(reader, attempt))


class TreeCache:
    """The conversations that were shown last: a few numbers for each exchange."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._trees: OrderedDict[tuple[str, int], ExchangeTree] = OrderedDict()  # bound: `most`
        self._lock = Lock()

    def get(self, key: tuple[str, int], read: Callable[[], ExchangeTree]) -> ExchangeTree:
        """Return the tree of a segment of this size; `read` it if it is not known."""
        with self._lock:
            if key in self._trees:
                self._trees.move_to_end(key)
                return self._trees[key]
        tree = read()
        with self._lock:
            self._trees[key] = tree
            while len(self._trees) > self._most:
                self._trees.popitem(last=False)
        return tree


def _choose_thread(threads: list[ExchangeThread], asked: PageRequest) -> ExchangeThread:
    place = asked.read_number("thread")
    if not threads:
        return ExchangeThread(0, ())
    if not 0 <= place < len(threads):
        raise BadInput(f"the attempt has no thread {place}", f"it has threads 0 to {len(threads) - 1}")
    return threads[place]


def _find_start(thread: ExchangeThread, asked: PageRequest) -> int:
    """Return the place in the thread at which the window begins."""
    turn = asked.read_number("turn")
    if turn and turn in thread.numbers:
        return thread.numbers.index(turn)
    return max(0, min(asked.read_number("from"), len(thread.numbers)))


_trees = TreeCache(MOST_TREES)
