"""Requests that name what they go on with and do not send it, because the provider keeps it.

`ReplyChain` knows the exchange behind each name, a reply's id or a conversation's. `recorder.py` asks it for
the parent of a request; how a dialect writes names is in the dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Raw

MOST_LINKS = 4096  # exchanges of an attempt that a request can name


class ChainName(NamedTuple):
    """What a request goes on with."""

    name: str
    stays: bool  # a later request goes on with the same name


class Chaining(NamedTuple):
    """How a dialect names what a request goes on with."""

    before: Callable[[Mapping[str, Raw]], ChainName | None]
    name: Callable[[bytes], str]  # of a reply; empty: it has none
    said: Callable[[bytes], list[bytes]]  # the messages that a reply adds to the conversation
    item: Callable[[bytes], str]  # the name of a message; empty: it has none
    reference: Callable[[bytes], str]  # the name of the earlier message that a message stands for; or empty


class ChainLink(NamedTuple):
    """An exchange that a request can name, and how many messages its own request has."""

    number: int
    messages: int


class ReplyChain:
    """The names of an attempt's exchanges in one dialect; `chaining` is None where a dialect has no names."""

    def __init__(self, chaining: Chaining | None) -> None:
        self._chaining = chaining
        self._links: dict[str, ChainLink] = {}  # bound: MOST_LINKS
        self._items: dict[str, int] = {}  # the exchange whose reply has a message; bound: MOST_LINKS

    def before(self, head: Mapping[str, Raw]) -> ChainName | None:
        """What a request with this head goes on with."""
        return self._chaining.before(head) if self._chaining is not None else None

    def find(self, name: ChainName | None) -> ChainLink | None:
        """The exchange of that name, if it is in the record."""
        return self._links.get(name.name) if name is not None else None

    def said(self, reply: bytes) -> list[bytes]:
        """The messages that a reply adds to the conversation."""
        return self._chaining.said(reply) if self._chaining is not None else []

    def add(self, link: ChainLink, before: ChainName | None, reply: bytes) -> None:
        """An exchange is in the record: later requests may go on with its reply, or with its conversation."""
        if self._chaining is None:
            return
        lasting = before.name if before is not None and before.stays else ""
        for name in filter(None, (self._chaining.name(reply), lasting)):
            self._links.pop(name, None)
            self._links[name] = link
        for name in filter(None, map(self._chaining.item, self._chaining.said(reply))):
            self._items[name] = link.number
        for known in (self._links, self._items):
            while len(known) > MOST_LINKS:
                del known[next(iter(known))]

    def resolve(self, message: bytes, read: Callable[[int], bytes]) -> bytes:
        """The message of an earlier reply that `message` stands for; itself, where it is none or unknown.

        `read` gives the reply of an exchange.
        """
        name = self._chaining.reference(message) if self._chaining is not None else ""
        if self._chaining is None or name not in self._items:
            return message
        said = self._chaining.said(read(self._items[name]))
        return next((item for item in said if self._chaining.item(item) == name), message)
