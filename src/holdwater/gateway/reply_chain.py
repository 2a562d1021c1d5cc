"""Finds the parent of requests that name the reply or conversation they continue and do not send it.

The provider stores such a conversation. `ReplyChain` maps each name, the id of a reply or of a conversation,
to an exchange. `recorder.py` looks parents up in it; the dialects parse the names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from msgspec import Raw

from ..dialect.interface import ChainName, ChainRules

MOST_LINKS = 4096  # exchanges of one attempt that requests can name


class ChainLink(NamedTuple):
    """An exchange that a request can name, and the number of messages in its own request."""

    number: int
    messages: int


class ReplyChain:
    """The names of an attempt's exchanges in one dialect; `chaining` is None if the dialect has no names."""

    def __init__(self, chaining: ChainRules | None) -> None:
        self._chaining = chaining
        self._links: dict[str, ChainLink] = {}  # bound: MOST_LINKS
        self._items: dict[str, int] = {}  # message name -> exchange whose reply has it; bound: MOST_LINKS

    def find_name(self, head: Mapping[str, Raw]) -> ChainName | None:
        """Return the name that a request with this head continues."""
        return self._chaining.before(head) if self._chaining is not None else None

    def find(self, name: ChainName | None) -> ChainLink | None:
        """Return the exchange of that name, if it is recorded."""
        return self._links.get(name.name) if name is not None else None

    def read_messages(self, reply: bytes) -> list[bytes]:
        """Return the messages that a reply adds to the conversation."""
        return self._chaining.reply_messages(reply) if self._chaining is not None else []

    def add(self, link: ChainLink, before: ChainName | None, reply: bytes) -> None:
        """Add a recorded exchange: later requests may continue its reply, or its conversation."""
        if self._chaining is None:
            return
        lasting = before.name if before is not None and before.stays else ""
        for name in filter(None, (self._chaining.name(reply), lasting)):
            self._links.pop(name, None)
            self._links[name] = link
        for name in filter(None, map(self._chaining.item, self._chaining.reply_messages(reply))):
            self._items[name] = link.number
        for known in (self._links, self._items):
            while len(known) > MOST_LINKS:
                del known[next(iter(known))]

    def resolve(self, message: bytes, read: Callable[[int], bytes]) -> bytes:
        """Return the earlier message that `message` refers to, or `message` if it is no known reference.

        `read` returns the reply of an exchange.
        """
        name = self._chaining.reference(message) if self._chaining is not None else ""
        if self._chaining is None or name not in self._items:
            return message
        said = self._chaining.reply_messages(read(self._items[name]))
        return next((item for item in said if self._chaining.item(item) == name), message)
