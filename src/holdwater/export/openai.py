"""Exports conversations for fine-tuning, as Chat Completions lines: `{"messages": [...], "tools": [...]}`.

A conversation is the request of the trajectory's last answered turn, and its reply. It is written message by
message. Media are data URLs, as the format requires; `atif.py` writes media as files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from ..conversation.trajectory import ExchangeTree
from ..dialect import find_dialect
from ..dialect.conversion import to_chat_message
from ..dialect.message import CallPairing, CommonMessage, as_dict, decode_foreign, merge_messages
from ..ledger.blobs import resolve_references
from ..ledger.reader import LedgerReader
from .samples import ExportOmissions

PASSED = "passed"


def write_conversations(
    reader: LedgerReader, everything: bool, out: BinaryIO, omitted: ExportOmissions
) -> None:
    """Write a line for each chosen attempt that passed; with `everything`, for each attempt with a reply."""
    for attempt in _select_attempts(reader, everything):
        if omitted.omits(attempt):
            continue
        tree = ExchangeTree(reader.directory, attempt)
        last = find_last_answered(tree)
        if last:
            _write_conversation(tree, last, out)


def _select_attempts(reader: LedgerReader, everything: bool) -> Iterator[int]:
    if everything:
        yield from (row.attempt for row in reader.attempts() if row.regrades is None)
        return
    for outcome in reader.outcomes():
        if outcome.kind == PASSED:
            yield reader.acting_attempt(outcome.attempt)


def find_last_answered(tree: ExchangeTree) -> int:
    """Return the last turn of the trajectory that has a complete reply; 0 if there is none."""
    for thread in tree.threads()[:1]:
        for number in reversed(thread.numbers):
            exchange = tree.exchange(number)
            if exchange.reply is not None and not exchange.error and _read_reply(tree, number) is not None:
                return number
    return 0


def _write_conversation(tree: ExchangeTree, number: int, out: BinaryIO) -> None:
    out.write(b'{"messages":[')
    separator = b""
    for message in render_chat_messages(tree, number):
        out.write(separator + _encode(message))
        separator = b","
    tools = render_chat_tools(tree, number)
    out.write(b'],"tools":%s}\n' % _encode(tools) if tools else b"]}\n")


def render_chat_messages(tree: ExchangeTree, number: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of a request and its reply in the Chat Completions format."""
    pairing = CallPairing()
    for message in _read_messages(tree, number):
        if message.role != "unknown":
            yield to_chat_message(pairing.pair_message(message))


def render_chat_tools(tree: ExchangeTree, number: int) -> list[dict[str, Any]]:
    """Return the tools of a request in the Chat Completions format."""
    return list(find_dialect(tree.exchange(number).dialect).parse_tools(tree.head(number)))


def _read_messages(tree: ExchangeTree, number: int) -> Iterator[CommonMessage]:
    dialect = find_dialect(tree.exchange(number).dialect)
    yield from dialect.parse_system(tree.head(number))
    sent = _read_sent(tree, number)
    yield from merge_messages(sent) if dialect.merges_items else sent
    reply = _read_reply(tree, number)
    if reply is not None:
        yield reply


def _read_sent(tree: ExchangeTree, number: int) -> Iterator[CommonMessage]:
    for name, raw in tree.request(number):
        yield from find_dialect(name).parse_messages(
            [decode_foreign(resolve_references(bytes(raw), tree.blobs))]
        )


def _read_reply(tree: ExchangeTree, number: int) -> CommonMessage | None:
    exchange = tree.exchange(number)
    if exchange.reply is None:
        return None
    whole = decode_foreign(resolve_references(bytes(exchange.reply), tree.blobs))
    return find_dialect(exchange.dialect).parse_reply(as_dict(whole)).message


_encode = msgspec.json.Encoder().encode
