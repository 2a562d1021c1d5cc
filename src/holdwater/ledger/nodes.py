"""The conversation of an attempt as message nodes with parent links: what a trainer trains on.

Conversations that begin alike share their first nodes, and a reply that its client sends back is the node
that the model said. One exchange is in memory at a time. Which exchange continues which: `trajectory.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from blake3 import blake3

from ..core.records import Exchange
from ..core.serving import Node
from . import dialects
from .dialects import Reply
from .directory import RunDirectory
from .media import resolve
from .message import Message, decoded, fields, gist, items, merged, plain, referring
from .trajectory import Tree

Media = Literal["reference", "inline"]

_DIGEST = 16  # bytes of blake3: collisions cannot be crafted
_NOTHING = -1  # stands before the first message
_WITHIN = -2  # a message that is not the last of those that send a reply back


def nodes(directory: RunDirectory, attempt: int, media: Media = "reference") -> Iterator[Node]:
    """Every message that was sent or said in an attempt, once; each after the one before it."""
    return nodes_of(Tree(directory, attempt), media)


def nodes_of(tree: Tree, media: Media = "reference") -> Iterator[Node]:
    growth = _Growth(tree, inline=media == "inline")
    for number in tree.numbers():
        if tree.converses(number):
            yield from growth.exchange(number)


class _Item(NamedTuple):
    """A message of a request."""

    raw: bytes
    value: Any  # decoded, its references marked
    said: list[Message]

    @property
    def spoken(self) -> bool:
        return bool(self.said) and all(message.role == "assistant" for message in self.said)


class _Place(NamedTuple):
    """Where the messages of a request are: of those behind the first `skipped`, the node of each."""

    root: int
    parent: int | None  # the exchange that has the skipped ones
    skipped: int
    ends: array[int]


class _Growth:
    """The nodes of one attempt, as far as they are known: a few words a message, nothing of what was said."""

    def __init__(self, tree: Tree, *, inline: bool) -> None:
        self._tree = tree
        self._inline = inline
        self._count = 0
        self._places: dict[int, _Place] = {}  # bound: the exchanges of one attempt
        # (the node before, what was sent or said after it) -> node; bound: its messages
        self._sent: dict[tuple[int, bytes], int] = {}
        self._said: dict[tuple[int, bytes], int] = {}
        self._ids: dict[int, int] = {}  # bound: the tokens that the model has

    def exchange(self, number: int) -> Iterator[Node]:
        """What is new in an exchange; its parent has been here."""
        exchange = self._tree.exchange(number)
        root = yield from self._rooted(exchange)
        tip, skipped, messages = self._start(exchange, root)
        ends = array("q")
        for run in _runs(exchange.dialect, messages):
            known = self._said.get((tip, _gist(run))) if run[0].spoken else None
            if known is None:
                for item in run:
                    tip = yield from self._add(tip, item, exchange)
                    ends.append(tip)
            else:
                tip = known
                ends.extend([_WITHIN] * (len(run) - 1) + [tip])
        self._places[number] = _Place(root, exchange.parent, skipped, ends)
        if whole(exchange):
            for message, reply in self._replies(exchange):
                yield self._sampled(tip, message, reply, exchange)

    def _rooted(self, exchange: Exchange) -> Generator[Node, None, int]:
        """The node of what stands beside the messages: another one begins another conversation."""
        if exchange.head is None and exchange.parent is not None:
            return self._places[exchange.parent].root
        at = _NOTHING
        for message, value in _beside(exchange.dialect, self._tree.head(exchange.number)):
            item = _Item(msgspec.json.encode(value), value, [message])
            at = yield from self._add(at, item, exchange)
        return at

    def _start(self, exchange: Exchange, root: int) -> tuple[int, int, Iterable[msgspec.Raw]]:
        """The node that an exchange goes on from, how many messages are before it, and those after it."""
        if exchange.parent is not None and self._places[exchange.parent].root == root:
            at = self._end(exchange.parent, exchange.keep)
            if at != _WITHIN:
                return at, exchange.keep, exchange.append
        return root, 0, (raw for _, raw in self._tree.request(exchange.number))

    def _end(self, number: int, count: int) -> int:
        """The node of the last of the first `count` messages of a request."""
        place = self._places[number]
        while count <= place.skipped and place.skipped and place.parent is not None:
            place = self._places[place.parent]
        return place.ends[count - place.skipped - 1] if count else place.root

    def _add(self, before: int, item: _Item, exchange: Exchange) -> Generator[Node, None, int]:
        # However it was written: a client may set its JSON otherwise the next time.
        sent = msgspec.json.encode((exchange.dialect, item.value), order="sorted")
        key = before, blake3(sent).digest(_DIGEST)
        known = self._sent.get(key)
        if known is not None:
            return known
        self._sent[key] = new = self._next()
        yield Node(
            id=new,
            parent=_parent(before),
            role=item.said[0].role if item.said else "unknown",
            message=self._shown(item.raw, item.value),
            exchange=exchange.number,
            dialect=exchange.dialect,
            by=exchange.by,
        )
        return new

    def _replies(self, exchange: Exchange) -> Iterator[tuple[Any, Reply]]:
        """What the model said, as its client would send it back, choice by choice."""
        raw = bytes(exchange.reply or b"null")
        value = referring(raw)
        shown = _choices(exchange.dialect, fields(self._shown(raw, value)))
        for (message, _), (_, one) in zip(shown, _choices(exchange.dialect, fields(value)), strict=True):
            reply = dialects.dialect(exchange.dialect).reply(one)
            if reply.message is not None:
                yield message, reply

    def _sampled(self, before: int, message: Any, reply: Reply, exchange: Exchange) -> Node:
        new = self._next()
        self._said[before, gist(reply.message or Message("assistant"))] = new
        return Node(
            id=new,
            parent=_parent(before),
            role="assistant",
            message=message,
            exchange=exchange.number,
            dialect=exchange.dialect,
            sampled=True,
            tokens=self._shared(reply.tokens.completion),
            prompt_tokens=self._shared(reply.tokens.prompt),
            logprobs=reply.tokens.logprobs or None,
            version=exchange.version,
            finish=reply.finish,
            by=exchange.by,
        )

    def _shared(self, ids: tuple[int, ...]) -> tuple[int, ...] | None:
        """The same ids: each prompt repeats the one before, and a number of its own takes 28 bytes."""
        return tuple(map(self._ids.setdefault, ids, ids)) or None

    def _shown(self, raw: bytes, value: Any) -> Any:
        """What stands for `raw` in a node, its media as asked."""
        if b'"holdwater-' not in raw:
            return value
        return decoded(resolve(raw, self._tree.blobs)) if self._inline else plain(value)

    def _next(self) -> int:
        self._count += 1
        return self._count - 1


def whole(exchange: Exchange) -> bool:
    """Whether the model said all that it had to say: what broke off was not sampled to its end."""
    return exchange.status == 200 and not exchange.error and exchange.reply is not None


def _parent(before: int) -> int | None:
    return None if before == _NOTHING else before


def _runs(dialect: str, messages: Iterable[msgspec.Raw]) -> Iterator[list[_Item]]:
    """Each message for itself; in Responses, all that the model said at a time."""
    run: list[_Item] = []
    for raw in messages:
        value = referring(bytes(raw))
        item = _Item(bytes(raw), value, dialects.messages(dialect, [value]))
        if run and not (dialect == "responses" and item.spoken and run[0].spoken):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _gist(run: list[_Item]) -> bytes:
    [message, *_] = merged(message for item in run for message in item.said)
    return gist(message)


def _beside(dialect: str, head: dict[str, Any]) -> Iterator[tuple[Message, Any]]:
    """What a dialect has in the place of messages, each as it was sent."""
    names = {
        "messages": ("system",),
        "responses": ("instructions", "input"),
        "gemini": ("systemInstruction", "system_instruction"),
    }
    for name in names.get(dialect, ()):
        for message in dialects.dialect(dialect).system({name: head.get(name)}):
            yield message, head[name]


def _choices(dialect: str, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    if dialect == "responses":
        yield reply.get("output"), reply
    elif dialect == "messages":
        yield {"role": "assistant", "content": reply.get("content")}, reply
    else:
        choices, message = ("choices", "message") if dialect == "chat" else ("candidates", "content")
        for choice in map(fields, items(reply.get(choices))):
            yield choice.get(message), {**reply, choices: [choice]}
