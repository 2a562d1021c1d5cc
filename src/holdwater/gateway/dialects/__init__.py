"""The API dialects of clients: each parses its requests, errors, replies, streams and usage.

A dialect interprets bytes; it neither sends nor records. `routes.py` maps paths to dialects, and `relay.py`
handles the calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..request_parser import RequestForm

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"


class RequestTarget(NamedTuple):
    """The address of a call: the path below the upstream's base URL, and the query without a key."""

    path: str
    query: str = ""

    @property
    def path_and_query(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


class ReplyFormat(StrEnum):
    """The form in which a reply is sent."""

    WHOLE = "whole"
    EVENTS = "events"
    ARRAY = "array"  # Google's chunks, without server-sent events


class AdaptedRequest(NamedTuple):
    """The parts of a request that decide how it is forwarded."""

    place: RequestTarget
    changes: dict[str, Raw]  # the keys that change on the way upstream
    recorded_keys: Mapping[str, Raw] = MappingProxyType({})  # keys for the record that the body does not have
    wants_usage: bool = True


class ParsedReply(NamedTuple):
    """A reply in one piece."""

    usage: ModelUsage
    error: Any  # an error inside a 200, if any
    reply: bytes | None = None  # for the record, if it differs from the body
    chunks: bytes | None = None  # the original body, if it is a JSON array of chunks


class ReplyStream(Protocol):
    """Reads a stream of events and assembles the reply."""

    done: bool  # the end mark was received
    error: Any

    @property
    def began(self) -> bool:
        """Whether any content was received."""

    @property
    def ended(self) -> bool:
        """Whether all following events belong to the end of the reply."""

    def events(self, piece: bytes) -> Iterator[bytes]:
        """Yield the events that `piece` completes, each as it is forwarded to the client."""

    @property
    def rest(self) -> bytes:
        """The start of an incomplete event."""

    def reply(self) -> bytes:
        """Return the content so far, in the form of a reply that was not streamed."""

    @property
    def chunks(self) -> bytes | None:
        """The original chunks as a JSON array, if `render_stream` cannot reproduce them; else None."""

    @property
    def usage(self) -> ModelUsage: ...


class Dialect(Protocol):
    """One API dialect. It is stateless; a `ReplyStream` is not."""

    @property
    def form(self) -> RequestForm:
        """Its name, and where its requests hold the messages."""

    @property
    def keep_alive(self) -> bytes:
        """A stream event without meaning that keeps the connection alive."""

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        """Return the request as forwarded, with `model` imposed if set; raise `msgspec.MsgspecError`."""

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes: ...

    def read_reply(self, body: bytes) -> ParsedReply:
        """Parse a reply; raise one of `request_parser.DECODE_ERRORS` if it is invalid."""

    def stream(self, asked: AdaptedRequest) -> ReplyStream: ...

    def render_stream(self, reply: bytes) -> list[bytes]:
        """Return the events of a stream equal to `reply`; raise one of `request_parser.DECODE_ERRORS`."""


def impose_model(head: dict[str, Raw], model: str | None) -> dict[str, Raw]:
    """Return the change that imposes `model`, if one is needed."""
    if model is None:
        return {}
    name = msgspec.json.encode(model)
    return {} if bytes(head.get("model", b"")) == name else {"model": Raw(name)}
