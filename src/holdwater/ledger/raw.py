"""One exchange as JSON as it went over the wire, media in their places; written piece by piece.

The order of a request's keys is not kept. What it means is in `trajectory.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from . import dialects
from .media import resolve
from .trajectory import Tree


def raw_turn(tree: Tree, number: int) -> Iterator[bytes]:
    """One JSON document: `{"turn", "dialect", "status", "error", "request", "reply"}`."""
    exchange = tree.exchange(number)
    about = {
        "turn": number,
        "dialect": exchange.dialect,
        "status": exchange.status,
        "error": exchange.error,
        "streamed": exchange.streamed,
    }
    yield _encode(about)[:-1] + b',"request":'
    yield from _request(tree, number, exchange.dialect)
    yield b',"reply":'
    yield b"null" if exchange.reply is None else resolve(bytes(exchange.reply), tree.blobs)
    yield b"}\n"


def _request(tree: Tree, number: int, dialect: str) -> Iterator[bytes]:
    head = msgspec.json.decode(tree.raw_head(number), type=dict[str, msgspec.Raw])
    if dialect == "gemini":
        head.pop("model", None)  # there it is part of the path, and only noted
    yield _encode(head)[:-1]
    separator = b"," if head else b""
    opened = False
    for _, message in tree.request(number):
        key = b"" if opened else b"%s:[" % _encode(dialects.dialect(dialect).key)
        yield separator + key + resolve(bytes(message), tree.blobs)
        separator, opened = b",", True
    yield b"]}" if opened else b"}"


_encode = msgspec.json.Encoder().encode
