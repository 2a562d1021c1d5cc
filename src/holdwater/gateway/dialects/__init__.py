"""The languages that clients speak: each knows its requests, errors, replies, streams and where usage stands.

A dialect sees bytes and says what they mean; it neither sends nor records. Which path belongs to which is in
`routes.py`, what is done with a call in `relay.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import Form

COMMENT = b": keep-alive\n\n"


class Place(NamedTuple):
    """Where a call is addressed: the path below the upstream's base URL, and the query without a key."""

    path: str
    query: str = ""

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class Manner(StrEnum):
    """How a reply is told."""

    WHOLE = "whole"
    EVENTS = "events"
    ARRAY = "array"  # Google's chunks, without server-sent events


class Asked(NamedTuple):
    """What a request asks for, as far as it changes how it is passed on."""

    place: Place
    changes: dict[str, Raw]  # the keys that change on the way up
    beside: Mapping[str, Raw] = MappingProxyType({})  # what the record has to know and the body does not say
    wants_usage: bool = True


class Whole(NamedTuple):
    """A reply that came in one piece."""

    usage: Usage
    error: Any  # an error inside a 200, if there is one
    reply: bytes | None = None  # for the record, where it is not the body as it came
    chunks: bytes | None = None  # the body as it came, where that is a JSON array of chunks


class Stream(Protocol):
    """Reads a stream of events and puts the reply together."""

    done: bool  # the end mark came
    error: Any

    @property
    def began(self) -> bool:
        """Was anything said yet?"""

    @property
    def ended(self) -> bool:
        """From here on, what comes ends the reply."""

    def events(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes, each as it goes on to the client."""

    @property
    def rest(self) -> bytes:
        """The start of an event whose end has not come."""

    def reply(self) -> bytes:
        """What came, in the shape of a reply that was not streamed."""

    @property
    def chunks(self) -> bytes | None:
        """What came, piece by piece, where `told` cannot say it so again: a JSON array."""

    @property
    def usage(self) -> Usage: ...


class Dialect(Protocol):
    """One of the four. It is stateless; a `Stream` is not."""

    @property
    def form(self) -> Form:
        """Its name, and where the messages stand."""

    @property
    def keep_alive(self) -> bytes:
        """A sign of life in a stream, without meaning."""

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        """What is asked for, with `model` imposed if there is one; raises `msgspec.MsgspecError`."""

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes: ...

    def read_reply(self, body: bytes) -> Whole:
        """Raises one of `recorder.UNREADABLE` if it is no reply."""

    def stream(self, asked: Asked) -> Stream: ...

    def told(self, reply: bytes) -> list[bytes]:
        """The events of a stream that says what `reply` says; raises one of `recorder.UNREADABLE`."""


def renamed(head: dict[str, Raw], model: str | None) -> dict[str, Raw]:
    """The change that imposes `model`, if one is needed."""
    if model is None:
        return {}
    name = msgspec.json.encode(model)
    return {} if bytes(head.get("model", b"")) == name else {"model": Raw(name)}
