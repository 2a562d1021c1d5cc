"""The conversation of an attempt: a window of turns, the outline beside it, its threads, and search in it.

The tree of an attempt holds a few numbers for each exchange; only the turns of the window are read from disk,
with their long texts cut. `turn_pages.py` has everything about one turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import msgspec

from ..conversation.exchange_tree import ExchangeThread, ExchangeTree
from ..conversation.long_texts import ShortRecords
from ..conversation.trajectory import (
    Turn,
    find_recorded_attempt,
    parse_reply,
    read_thread_turns,
)
from ..conversation.transcript_search import TranscriptHit, search_turns
from ..core.errors import BadInput
from ..core.records import ModelUsage
from ..dialect.message import CommonMessage, ReplyTokens
from ..ledger.blobs import BlobStore
from ..ledger.exchanges import segment_path
from ..ledger.reader import LedgerReader
from .file_pages import find_attempt_row
from .page import LONGEST_TEXT, PageRequest, PageResponse, render_page

WINDOW = 20  # turns
WINDOW_SIZE = 1 << 20  # characters in a window; at least one turn is shown
OUTLINE = 200  # turns in a window of the outline
MOST_TREES = 4
MOST_NODES = 30_000  # exchanges in the trees that are kept
MOST_LANES = 30
MOST_BRANCHES = 5  # threads that are listed at one turn
SEARCH_SECONDS = 0.25  # for one page of hits
IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")  # types without scripts


class TokenSummary(NamedTuple):
    """The number of tokens of a turn, where the record has them."""

    prompt: int
    completion: int
    has_logprobs: bool
    breaks: bool  # the prompt does not continue the tokens before it


class ThreadLane(NamedTuple):
    """A thread beside the others: when it began and ended, and where it came from."""

    place: int
    turns: int
    first: int
    last: int
    by: str  # the child that made its calls
    parent: int | None  # the turn at which it branches off
    converses: bool

    @property
    def title(self) -> str:
        if self.by:
            return f"child {self.by}"
        return "trajectory" if self.place == 0 else f"side {self.place}"


class ShownTurn(NamedTuple):
    """A turn on the page."""

    turn: Turn
    tokens: TokenSummary | None
    branches: list[ThreadLane]  # the threads that began at it
    more_branches: int


class OutlinedTurn(NamedTuple):
    """A turn in the outline."""

    number: int
    tools: tuple[str, ...]
    usage: ModelUsage
    seconds: float
    failed: bool


def show_transcript(asked: PageRequest) -> PageResponse:
    attempt = asked.read_part("attempt")
    with asked.pool.open(asked.run) as reader:
        row = find_attempt_row(reader, attempt)
        tree = open_tree(reader, attempt)
        recorded = reader.whole_verdict(attempt).exchanges
        running = row.settled is None and reader.directory.find_holder() is not None
    lanes, hidden = list_lanes(tree)
    values = _describe_window(asked, tree)
    about = {"row": row, "running": running, "count": len(tree), "lost": max(0, recorded - len(tree))}
    return render_page("transcript.html", lanes=lanes, hidden=hidden, **about, **values)


def show_turns(asked: PageRequest) -> PageResponse:
    """Show the next window: the page loads it when it is scrolled to, or when the conversation has grown."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
    return render_page("turns.html", **_describe_window(asked, tree))


def show_outline(asked: PageRequest) -> PageResponse:
    """Show a window of the outline: for each turn its tools, tokens and seconds."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
    thread = choose_thread(tree, asked)
    start = _find_start(thread, asked)
    turns = [_outline_turn(tree, number) for number in thread.numbers[start : start + OUTLINE]]
    values = {"thread": thread, "start": start, "turns": turns, "step": OUTLINE}
    return render_page(
        "outline.html", asked=asked, run=asked.run, attempt=asked.read_part("attempt"), **values
    )


def find_text(asked: PageRequest) -> PageResponse:
    """Search the whole conversation for a text; a page of hits says where the search continues."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
    query, start = asked.query.get("q", "").strip()[:500], asked.read_number("after")
    hits: list[TranscriptHit] = []
    following: int | None = None
    if query:
        hits, following = search_turns(tree, query, start, deadline=monotonic() + SEARCH_SECONDS)
    values = {"hits": hits, "following": following, "query": query, "first": not start, "count": len(tree)}
    return render_page("hits.html", asked=asked, run=asked.run, attempt=asked.read_part("attempt"), **values)


def _describe_window(asked: PageRequest, tree: ExchangeTree) -> dict[str, Any]:
    thread = choose_thread(tree, asked)
    start = _find_start(thread, asked)
    turns = list(show_window(tree, thread, start))
    return {
        "asked": asked,
        "run": asked.run,
        "attempt": asked.read_part("attempt"),
        "thread": thread,
        "start": start,
        "end": start + len(turns),
        "shown": turns,
        "window": WINDOW,
        "last": thread.numbers[-1] if thread.numbers else 0,
        **describe_messages(),
    }


def describe_messages() -> dict[str, Any]:
    """Return the values that every template with messages needs."""
    return {"longest": LONGEST_TEXT, "images": IMAGES}


def show_window(tree: ExchangeTree, thread: ExchangeThread, start: int) -> Iterator[ShownTurn]:
    """Yield the turns of a window: fewer of them if they are large."""
    size = 0
    before = _find_earlier_tokens(tree, thread, start)
    branches = _find_branches(tree, thread, start)
    for turn in read_window(tree, thread, start):
        tokens, before = _count_tokens(turn, before)
        lanes = branches.get(turn.number, [])
        bare = msgspec.structs.replace(turn, tokens=ReplyTokens())  # prompts of 100,000 tokens take megabytes
        yield ShownTurn(bare, tokens, lanes[:MOST_BRANCHES], len(lanes[MOST_BRANCHES:]))
        size += measure_turn(turn)
        if size >= WINDOW_SIZE:
            return


def find_place(asked: PageRequest) -> int:
    """Return the place in the thread at which the window of an address begins."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
    return _find_start(choose_thread(tree, asked), asked)


def list_window(asked: PageRequest) -> list[int]:
    """Return the numbers of the turns in the window of an address."""
    with asked.pool.open(asked.run) as reader:
        tree = open_tree(reader, asked.read_part("attempt"))
    thread = choose_thread(tree, asked)
    return [shown.turn.number for shown in show_window(tree, thread, _find_start(thread, asked))]


def read_window(tree: ExchangeTree, thread: ExchangeThread, start: int) -> Iterator[Turn]:
    """Yield the turns of a window; the exchange before it is read for its reply alone."""
    numbers = thread.numbers[max(0, start - 1) : start + WINDOW]
    turns = read_thread_turns(tree, ExchangeThread(thread.place, numbers))
    return islice(turns, 1 if start else 0, None)


def measure_turn(turn: Turn) -> int:
    """Return the number of characters in the texts of a turn."""
    messages = (*turn.new, *((turn.reply,) if turn.reply else ()), *turn.others)
    return sum(_measure_message(message) for message in messages)


def _measure_message(message: CommonMessage) -> int:
    texts = sum(len(part) if isinstance(part, str) else 0 for part in message.parts)
    return len(message.reasoning) + texts + sum(len(str(call.arguments)) for call in message.calls)


def _find_earlier_tokens(tree: ExchangeTree, thread: ExchangeThread, start: int) -> ReplyTokens:
    if start == 0:
        return ReplyTokens()
    exchange = tree.exchange(thread.numbers[start - 1])
    return parse_reply(exchange).tokens if exchange.complete else ReplyTokens()


def _count_tokens(turn: Turn, before: ReplyTokens) -> tuple[TokenSummary | None, ReplyTokens]:
    """Return the numbers of tokens of a turn, and the tokens that the next prompt is to continue."""
    own = turn.tokens
    if not (own.completion or own.logprobs):
        return None, before
    breaks = bool(own.prompt and before.prompt) and not continues_tokens(before, own)
    given = any(p is not None for p in own.logprobs)
    count = max(len(own.completion), len(own.logprobs))
    complete = turn.status == 200 and not turn.error and own.prompt and own.completion
    return TokenSummary(len(own.prompt), count, given, breaks), own if complete else before


def continues_tokens(before: ReplyTokens, after: ReplyTokens) -> bool:
    """Return whether a prompt begins with the prompt and the reply before it."""
    middle, end = len(before.prompt), len(before.prompt) + len(before.completion)
    return after.prompt[:middle] == before.prompt and after.prompt[middle:end] == before.completion


def _find_branches(tree: ExchangeTree, thread: ExchangeThread, start: int) -> dict[int, list[ThreadLane]]:
    """Return the other threads by the turn of the window at which they began."""
    numbers = thread.numbers[start : start + WINDOW]
    following = thread.numbers[start + WINDOW] if start + WINDOW < len(thread.numbers) else None
    found: dict[int, list[ThreadLane]] = {}
    for other in tree.threads():
        if other.place == thread.place or not other.numbers or not numbers:
            continue
        first = other.numbers[0]
        parent = tree.node(first).parent
        if parent not in numbers and (first < numbers[0] or (following is not None and first > following)):
            continue
        at = parent if parent in numbers else max((n for n in numbers if n < first), default=None)
        if at is not None and (parent is None or parent == at):
            found.setdefault(at, []).append(_describe_lane(tree, other))
    return found


def list_lanes(tree: ExchangeTree) -> tuple[list[ThreadLane], int]:
    """Return the trajectory and the longest threads beside it, and the number of further threads."""
    threads = [thread for thread in tree.threads() if thread.numbers]
    longest = sorted(threads[1:], key=lambda thread: -len(thread.numbers))[: MOST_LANES - 1]
    shown = [*threads[:1], *sorted(longest)]
    return [_describe_lane(tree, thread) for thread in shown], len(threads) - len(shown)


def _describe_lane(tree: ExchangeTree, thread: ExchangeThread) -> ThreadLane:
    node = tree.node(thread.numbers[0])
    ends = thread.numbers[0], thread.numbers[-1]
    return ThreadLane(thread.place, len(thread.numbers), *ends, node.by, node.parent, node.converses)


def _outline_turn(tree: ExchangeTree, number: int) -> OutlinedTurn:
    exchange = tree.exchange(number)
    reply = parse_reply(exchange).message
    tools = tuple(call.name for call in reply.calls[:3]) if reply else ()
    usage = exchange.usage.plus(exchange.saved)
    return OutlinedTurn(number, tools, usage, exchange.seconds, not exchange.complete)


def open_tree(reader: LedgerReader, attempt: int) -> ExchangeTree:
    """Return the conversation of an attempt with long texts cut; only its new exchanges are read."""
    return _trees.get(reader, find_recorded_attempt(reader, attempt))


class TreeCache:
    """The conversations that were shown last: a few numbers for each exchange."""

    def __init__(self, most: int, most_nodes: int) -> None:
        self._most = most
        self._most_nodes = most_nodes
        self._trees: OrderedDict[str, tuple[tuple[int, int], ExchangeTree]] = OrderedDict()  # bound: `most`
        self._lock = Lock()

    def get(self, reader: LedgerReader, attempt: int) -> ExchangeTree:
        """Return the tree of an attempt; a segment that has grown is read from where it ended."""
        path = segment_path(reader.directory, attempt)
        try:
            status = path.stat()
        except OSError:
            return ExchangeTree(reader.directory, attempt)
        with self._lock:
            identity, tree = self._trees.pop(str(path), ((0, 0), None))
        if tree is None or identity[0] != status.st_ino or identity[1] > status.st_size:
            records = ShortRecords(path, BlobStore(reader.directory.blobs))
            tree = ExchangeTree(reader.directory, attempt, records)
        elif identity[1] < status.st_size:
            tree = tree.extend()
        with self._lock:
            self._trees[str(path)] = (status.st_ino, status.st_size), tree
            while len(self._trees) > 1 and self._is_full():
                self._trees.popitem(last=False)
        return tree

    def _is_full(self) -> bool:
        nodes = sum(len(tree) for _, tree in self._trees.values())
        return len(self._trees) > self._most or nodes > self._most_nodes


def choose_thread(tree: ExchangeTree, asked: PageRequest) -> ExchangeThread:
    """Return the thread that the address names, by its place or by one of its turns."""
    threads: Sequence[ExchangeThread] = tree.threads()
    turn = asked.read_number("turn") or asked.read_number("after")
    if not threads and not turn:
        return ExchangeThread(0, ())
    place = asked.read_number("thread")
    if not 0 <= place < len(threads):
        raise BadInput(f"the attempt has no thread {place}", f"it has threads 0 to {len(threads) - 1}")
    return threads[place] if not turn or turn in threads[place].numbers else tree.find_thread(turn)


def _find_start(thread: ExchangeThread, asked: PageRequest) -> int:
    """Return the place in the thread at which the window begins."""
    if turn := asked.read_number("turn"):
        return thread.numbers.index(turn)
    if after := asked.read_number("after"):
        return thread.numbers.index(after) + 1
    return max(0, min(asked.read_number("from"), max(0, len(thread.numbers) - 1)))


_trees = TreeCache(MOST_TREES, MOST_NODES)
