"""Builds the input of a trainer from an attempt: message nodes with parent links and token ids.

Conversations with a common beginning share their first nodes. A reply that the client sends back is the node
that the model sampled. Token ids are taken from the replies and never computed. One exchange is in memory at
a time. `prompt_deltas.py` finds the new ids of a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from blake3 import blake3

from ..core.exchange import SCORING_BORROWERS, Exchange
from ..core.serving_protocol import MessageNode
from ..dialect import find_dialect
from ..dialect.message import (
    CommonMessage,
    ModelReply,
    ReplyTokens,
    as_dict,
    decode_foreign,
    decode_referring,
    digest_message,
    merge_messages,
    restore_references,
)
from ..ledger.blobs import resolve_references
from ..ledger.directory import RunDirectory
from .prompt_deltas import PromptDelta, PromptHistory
from .trajectory import ExchangeTree, read_original_tokens

MediaMode = Literal["reference", "inline"]

_DIGEST_SIZE = 16  # bytes of blake3: enough that collisions cannot be crafted
_NO_NODE = -1  # the parent of the first message
_INSIDE_REPLY = -2  # one of several messages that send a reply back, but not the last


def read_nodes(
    directory: RunDirectory, attempt: int, media: MediaMode = "reference"
) -> Iterator[MessageNode]:
    """Yield every message that was sent or sampled in an attempt, once and after its parent."""
    return build_nodes(ExchangeTree(directory, attempt), media)


def build_nodes(tree: ExchangeTree, media: MediaMode = "reference") -> Iterator[MessageNode]:
    growth = _NodeBuilder(tree, inline=media == "inline")
    for number in tree.numbers():
        if tree.converses(number):
            yield from growth.add_exchange(number)


class _RequestMessage(NamedTuple):
    """A message of a request."""

    raw: bytes
    value: Any  # decoded, with marked references
    messages: list[CommonMessage]

    @property
    def spoken(self) -> bool:
        return bool(self.messages) and all(message.role == "assistant" for message in self.messages)


class _RequestNodes(NamedTuple):
    """The nodes of a request's messages, after the first `skipped` messages."""

    root: int
    parent: int | None  # the exchange that has the skipped messages
    skipped: int
    ends: array[int]


class _NodeBuilder:
    """The nodes of one attempt so far: a few numbers per message, without the contents."""

    def __init__(self, tree: ExchangeTree, *, inline: bool) -> None:
        self._tree = tree
        self._inline = inline
        self._count = 0
        self._places: dict[int, _RequestNodes] = {}  # bound: the exchanges of one attempt
        # (parent node, digest of the message) -> node; bound: the messages of one attempt
        self._sent_nodes: dict[tuple[int, bytes], int] = {}
        self._reply_nodes: dict[tuple[int, bytes], int] = {}
        self._prompts = PromptHistory()

    def add_exchange(self, number: int) -> Iterator[MessageNode]:
        """Yield the new nodes of an exchange. Its parent must have been added before."""
        exchange = self._tree.exchange(number)
        root = yield from self._add_root(exchange)
        tip, skipped, messages = self._find_start(exchange, root)
        ends = array("q")
        for run in _group_messages(exchange.dialect, messages):
            known = self._reply_nodes.get((tip, _digest_run(run))) if run[0].spoken else None
            if known is None:
                for item in run:
                    tip = yield from self._add_message(tip, item, exchange)
                    ends.append(tip)
            else:
                tip = known
                ends.extend([_INSIDE_REPLY] * (len(run) - 1) + [tip])
        self._places[number] = _RequestNodes(root, exchange.parent, skipped, ends)
        if exchange.complete:
            for message, reply in self._read_replies(exchange):
                yield self._make_sampled(tip, message, reply, exchange)

    def _add_root(self, exchange: Exchange) -> Generator[MessageNode, None, int]:
        """Add the system prompt outside the message list; a different prompt begins another conversation."""
        if exchange.head is None and exchange.parent is not None:
            return self._places[exchange.parent].root
        at = _NO_NODE
        for message, value in _read_system(exchange.dialect, self._tree.head(exchange.number)):
            item = _RequestMessage(msgspec.json.encode(value), value, [message])
            at = yield from self._add_message(at, item, exchange)
        return at

    def _find_start(self, exchange: Exchange, root: int) -> tuple[int, int, Iterable[msgspec.Raw]]:
        """Return the node that an exchange continues, the message count up to it, and the later messages."""
        if exchange.parent is not None and self._places[exchange.parent].root == root:
            at = self._find_end(exchange.parent, exchange.keep)
            if at != _INSIDE_REPLY:
                return at, exchange.keep, exchange.append
        return root, 0, (raw for _, raw in self._tree.request(exchange.number))

    def _find_end(self, number: int, count: int) -> int:
        """Return the node of message `count` of a request; of 0, the root."""
        place = self._places[number]
        while count <= place.skipped and place.skipped and place.parent is not None:
            place = self._places[place.parent]
        return place.ends[count - place.skipped - 1] if count else place.root

    def _add_message(
        self, before: int, item: _RequestMessage, exchange: Exchange
    ) -> Generator[MessageNode, None, int]:
        # Sorted keys: a client may serialize the same message differently the next time.
        sent = msgspec.json.encode((exchange.dialect, item.value), order="sorted")
        key = before, blake3(sent).digest(_DIGEST_SIZE)
        known = self._sent_nodes.get(key)
        if known is not None:
            return known
        self._sent_nodes[key] = new = self._next_id()
        role = item.messages[0].role if item.messages else "unknown"
        self._prompts.add_message(new, _to_parent(before), role)
        yield MessageNode(
            id=new,
            parent=_to_parent(before),
            role=role,
            message=self._render_raw(item.raw, item.value),
            exchange=exchange.number,
            dialect=exchange.dialect,
            by=exchange.by,
        )
        return new

    def _read_replies(self, exchange: Exchange) -> Iterator[tuple[Any, ModelReply]]:
        """Yield each choice of a reply: the message as a client would send it back, and the parsed reply."""
        raw = bytes(exchange.reply or b"null")
        value = decode_referring(raw)
        dialect = find_dialect(exchange.dialect)
        shown = dialect.split_choices(as_dict(self._render_raw(raw, value)))
        replies = [dialect.parse_reply(one) for _, one in dialect.split_choices(as_dict(value))]
        for place, tokens in enumerate(read_original_tokens(exchange)[: len(replies)]):
            replies[place] = msgspec.structs.replace(replies[place], tokens=tokens)
        for (message, _), reply in zip(shown, replies, strict=True):
            if reply.message is not None:
                yield message, reply

    def _make_sampled(self, before: int, message: Any, reply: ModelReply, exchange: Exchange) -> MessageNode:
        new = self._next_id()
        self._reply_nodes[before, digest_message(reply.message or CommonMessage("assistant"))] = new
        delta = self._find_delta(new, before, reply.tokens, exchange.by)
        return MessageNode(
            id=new,
            parent=_to_parent(before),
            role="assistant",
            message=message,
            exchange=exchange.number,
            dialect=exchange.dialect,
            sampled=True,
            tokens=reply.tokens.completion or None,
            prompt_delta=delta.new if delta else None,
            follows=delta.follows if delta else None,
            shared=delta.shared if delta else 0,
            sequence_start=delta.start if delta else None,
            logprobs=reply.tokens.logprobs or None,
            version=exchange.version,
            finish=reply.finish,
            by=exchange.by,
        )

    def _find_delta(self, node: int, before: int, tokens: ReplyTokens, by: str) -> PromptDelta | None:
        """Return the new ids of the prompt of a reply; None if its ids are not known, or not trained on."""
        self._prompts.add_message(node, _to_parent(before), "assistant", sampled=True)
        if not tokens.prompt or not tokens.completion or by in SCORING_BORROWERS:
            return None
        return self._prompts.add_reply(node, by, tokens.prompt, tokens.completion)

    def _render_raw(self, raw: bytes, value: Any) -> Any:
        """Return the message of a node, with media inline or as references."""
        if b'"holdwater-' not in raw:
            return value
        return (
            decode_foreign(resolve_references(raw, self._tree.blobs))
            if self._inline
            else restore_references(value)
        )

    def _next_id(self) -> int:
        self._count += 1
        return self._count - 1


def _to_parent(before: int) -> int | None:
    return None if before == _NO_NODE else before


def _group_messages(name: str, messages: Iterable[msgspec.Raw]) -> Iterator[list[_RequestMessage]]:
    """Yield each message as a group of its own; in Responses, adjacent assistant items form one group."""
    dialect = find_dialect(name)
    run: list[_RequestMessage] = []
    for raw in messages:
        value = decode_referring(bytes(raw))
        item = _RequestMessage(bytes(raw), value, dialect.parse_messages([value]))
        if run and not (dialect.merges_items and item.spoken and run[0].spoken):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _digest_run(run: list[_RequestMessage]) -> bytes:
    [message, *_] = merge_messages(message for item in run for message in item.messages)
    return digest_message(message)


def _read_system(name: str, head: dict[str, Any]) -> Iterator[tuple[CommonMessage, Any]]:
    """Yield the prompts that a dialect has outside the message list, parsed and as they were sent."""
    dialect = find_dialect(name)
    for key in dialect.system_keys:
        for message in dialect.parse_system({key: head.get(key)}):
            yield message, head[key]
