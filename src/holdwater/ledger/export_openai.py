"""Conversations for fine-tuning: `{"messages": [...], "tools": [...]}` a line, as Chat Completions has them.

Each is the request of the trajectory's last answered turn, and its reply. Written message by message. Media
are data URLs, as that format has them; files are written by `export_atif.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from . import dialects
from .chat_message import chat_message
from .media import resolve
from .message import Message, Pairing, decoded, fields, merged
from .omitted import Omitted
from .reader import Reader
from .trajectory import Tree

PASSED = "passed"


def write_conversations(reader: Reader, everything: bool, out: BinaryIO, omitted: Omitted) -> None:
    """A line for each chosen attempt that passed; with `everything`, for each attempt that had a reply."""
    for attempt in _attempts(reader, everything):
        if omitted.omits(attempt):
            continue
        tree = Tree(reader.directory, attempt)
        last = last_answered(tree)
        if last:
            _write(tree, last, out)


def _attempts(reader: Reader, everything: bool) -> Iterator[int]:
    if everything:
        yield from (row.attempt for row in reader.attempts() if row.regrades is None)
        return
    for outcome in reader.outcomes():
        if outcome.kind == PASSED:
            yield reader.acting_attempt(outcome.attempt)


def last_answered(tree: Tree) -> int:
    """The last turn of the trajectory that ends with the model's word; 0 where there is none."""
    for thread in tree.threads()[:1]:
        for number in reversed(thread.numbers):
            exchange = tree.exchange(number)
            if exchange.reply is not None and not exchange.error and _reply(tree, number) is not None:
                return number
    return 0


def _write(tree: Tree, number: int, out: BinaryIO) -> None:
    out.write(b'{"messages":[')
    separator = b""
    for message in chat_messages(tree, number):
        out.write(separator + _encode(message))
        separator = b","
    tools = chat_tools(tree, number)
    out.write(b'],"tools":%s}\n' % _encode(tools) if tools else b"]}\n")


def chat_messages(tree: Tree, number: int) -> Iterator[dict[str, Any]]:
    """A request and its reply as Chat Completions has them."""
    pairing = Pairing()
    for message in _messages(tree, number):
        if message.role != "unknown":
            yield chat_message(pairing.named(message))


def chat_tools(tree: Tree, number: int) -> list[dict[str, Any]]:
    """The tools of a request in the same form."""
    return list(dialects.dialect(tree.exchange(number).dialect).tools(tree.head(number)))


def _messages(tree: Tree, number: int) -> Iterator[Message]:
    name = tree.exchange(number).dialect
    yield from dialects.dialect(name).system(tree.head(number))
    sent = _sent(tree, number)
    yield from merged(sent) if name == "responses" else sent
    reply = _reply(tree, number)
    if reply is not None:
        yield reply


def _sent(tree: Tree, number: int) -> Iterator[Message]:
    for name, raw in tree.request(number):
        yield from dialects.messages(name, [decoded(resolve(bytes(raw), tree.blobs))])


def _reply(tree: Tree, number: int) -> Message | None:
    exchange = tree.exchange(number)
    if exchange.reply is None:
        return None
    whole = decoded(resolve(bytes(exchange.reply), tree.blobs))
    return dialects.dialect(exchange.dialect).reply(fields(whole)).message


_encode = msgspec.json.Encoder().encode
