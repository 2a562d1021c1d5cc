"""Renders one exchange as JSON as it was sent and received, media included, in pieces.

The order of a request's keys is not preserved. `trajectory.py` interprets exchanges.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..dialect import find_dialect
from ..ledger.blobs import resolve_references
from .trajectory import ExchangeTree


def render_raw_turn(tree: ExchangeTree, number: int) -> Iterator[bytes]:
    """Yield one JSON document: `{"turn", "dialect", "status", "error", "streamed", "request", "reply"}`."""
    exchange = tree.exchange(number)
    about = {
        "turn": number,
        "dialect": exchange.dialect,
        "status": exchange.status,
        "error": exchange.error,
        "streamed": exchange.streamed,
    }
    yield _encode(about)[:-1] + b',"request":'
    yield from _render_request(tree, number)
    yield b',"reply":'
    yield b"null" if exchange.reply is None else resolve_references(bytes(exchange.reply), tree.blobs)
    yield b"}\n"


def _render_request(tree: ExchangeTree, number: int) -> Iterator[bytes]:
    head = msgspec.json.decode(tree.raw_head(number), type=dict[str, msgspec.Raw])
    dialect = find_dialect(tree.exchange(number).dialect)
    if dialect.model_in_path:
        head.pop("model", None)  # it is not part of the request body
    yield _encode(head)[:-1]
    separator = b"," if head else b""
    opened = False
    for _, message in tree.request(number):
        key = b"" if opened else b"%s:[" % _encode(dialect.key)
        yield separator + key + resolve_references(bytes(message), tree.blobs)
        separator, opened = b",", True
    yield b"]}" if opened else b"}"


_encode = msgspec.json.Encoder().encode
