"""Pages about one turn: changes of its request, whole long texts, tokens, the raw exchange, media.

Large contents are sent in pieces: none is whole in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import NamedTuple

from ..conversation.exchange_tree import ExchangeTree
from ..conversation.long_texts import ShortRecords
from ..conversation.request_changes import compare_request
from ..conversation.trajectory import parse_reply, render_raw_turn
from ..core.errors import BadInput
from ..core.exchange import Exchange
from ..dialect.message import ReplyTokens, as_dict, as_list, as_string, decode_referring
from ..ledger.blobs import BlobStore, is_hash
from .page import HTML, JSON, OCTETS, PageRequest, PageResponse, clean_text, render_page
from .transcript_pages import IMAGES, choose_thread, continues_tokens, describe_messages, open_tree

MOST_TOKENS = 4000  # that are shown, of the prompt and of the reply
PLAIN = "text/plain"


class ShownToken(NamedTuple):
    """A token with the log probability that the model gave it."""

    text: str  # or its number, if the record has no text
    logprob: float | None

    @property
    def heat(self) -> str:
        if self.logprob is None:
            return "unknown"
        levels = ((-0.05, "sure"), (-0.7, "likely"), (-2.3, "doubtful"))
        return next((name for least, name in levels if self.logprob >= least), "unlikely")


def show_changes(asked: PageRequest) -> PageResponse:
    """Show what the client changed against the request before."""
    turn = asked.read_number("turn")
    with asked.pool.open(asked.run) as reader:
        tree = _require_turn(open_tree(reader, asked.read_part("attempt")), turn)
        changes = compare_request(tree, turn)
    values = {"changes": changes, "turn": turn, "attempt": asked.read_part("attempt"), **describe_messages()}
    return render_page("changes.html", asked=asked, run=asked.run, **values)


def show_tokens(asked: PageRequest) -> PageResponse:
    """Show the tokens of a turn: the new ones of the prompt, which are masked, and the sampled ones."""
    turn = asked.read_number("turn")
    with asked.pool.open(asked.run) as reader:
        tree = _require_turn(open_tree(reader, asked.read_part("attempt")), turn)
    thread = choose_thread(tree, asked)
    at = thread.numbers.index(turn)
    exchange = tree.exchange(turn)
    tokens = parse_reply(exchange).tokens
    before = parse_reply(tree.exchange(thread.numbers[at - 1])).tokens if at else ReplyTokens()
    known = len(before.prompt) + len(before.completion)
    breaks = bool(tokens.prompt and before.prompt) and not continues_tokens(before, tokens)
    new = tokens.prompt if breaks else tokens.prompt[known:]
    values = {
        "prompt": new[-MOST_TOKENS:],
        "hidden_prompt": len(new) - len(new[-MOST_TOKENS:]),
        "kept": len(tokens.prompt) - len(new),
        "sampled": list(islice(_read_tokens(exchange, tokens), MOST_TOKENS)),
        "count": max(len(tokens.completion), len(tokens.logprobs)),
        "breaks": breaks,
    }
    return render_page("tokens.html", **values)


def send_raw_turn(asked: PageRequest) -> PageResponse:
    """Send request and reply of a turn as they were sent and received."""
    with asked.pool.open(asked.run) as reader:
        tree = _require_turn(open_tree(reader, asked.read_part("attempt")), asked.read_number("turn"))
    return PageResponse(b"", JSON, pieces=_render_raw(tree, asked.read_number("turn")))


def _render_raw(tree: ExchangeTree, turn: int) -> Iterator[bytes]:
    records = tree.records
    assert isinstance(records, ShortRecords)
    for piece in render_raw_turn(tree, turn):
        yield from records.write_whole(piece)


def send_text(asked: PageRequest) -> PageResponse:
    """Send the whole of a long text: as a page of plain text, as a part of a page, or as a download."""
    name, turn, form = asked.query.get("of", ""), asked.read_number("turn"), asked.query.get("as", "")
    with asked.pool.open(asked.run) as reader:
        tree = _require_turn(open_tree(reader, asked.read_part("attempt")), turn)
    records = tree.records
    assert isinstance(records, ShortRecords)
    tree.head(turn)  # prompts outside the messages are found when they are read
    texts = records.read_text(name)
    if form == "part":
        return PageResponse(b"", HTML, pieces=_render_text(texts))
    if form == "file":
        name = f"attempt-{asked.read_part('attempt')}-turn-{turn}-{name[:8]}.txt"
        return PageResponse(b"", OCTETS, charset=None, name=name, pieces=map(_encode_text, texts))
    return PageResponse(b"", PLAIN, pieces=(_encode_text(clean_text(text)) for text in texts))


def _render_text(texts: Iterator[str]) -> Iterator[bytes]:
    yield b"<pre>"
    for text in texts:
        yield _encode_text(escape(clean_text(text)))
    yield b"</pre>"


def send_blob(asked: PageRequest) -> PageResponse:
    """Send an image of a conversation; anything else is a download."""
    name = asked.parts["blob"]
    if not is_hash(name):
        raise BadInput("no such medium")
    with asked.pool.open(asked.run) as reader:
        pieces = BlobStore(reader.directory.blobs).read_pieces(name, 1 << 16)
    kind = asked.query.get("type", "")
    return PageResponse(b"", kind if kind in IMAGES else OCTETS, charset=None, pieces=pieces)


def _require_turn(tree: ExchangeTree, turn: int) -> ExchangeTree:
    tree.find_thread(turn)
    return tree


def _read_tokens(exchange: Exchange, tokens: ReplyTokens) -> Iterator[ShownToken]:
    """Yield the tokens of a reply, with their texts where the provider returns them."""
    reply = as_dict(decode_referring(bytes(exchange.reply or b"null")))
    choice = as_dict(next(iter(as_list(reply.get("choices"))), reply))
    texts = [
        as_string(as_dict(token).get("token"))
        for token in as_list(as_dict(choice.get("logprobs")).get("content"))
    ]
    for place in range(max(len(tokens.completion), len(tokens.logprobs))):
        text = texts[place] if place < len(texts) else ""
        number = str(tokens.completion[place]) if place < len(tokens.completion) else ""
        logprob = tokens.logprobs[place] if place < len(tokens.logprobs) else None
        yield ShownToken(text or number, logprob)


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "replace")
