"""Server-sent events: splits a stream into events, extracts their data, writes events.

The dialects interpret the data, and render complete replies as events with the functions at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from ..core.records import ModelUsage
from .message import SHAPE_ERRORS

Object = dict[str, Raw]
NULL = Raw(b"null")
_OBJECT = msgspec.json.Decoder(Object | None)
_OBJECTS = msgspec.json.Decoder(list[Object] | None)
_STRING = msgspec.json.Decoder(str | None)


class EventStream:
    """Reads a stream of events and assembles the reply. Each dialect reads an event's data in `_take`."""

    def __init__(self) -> None:
        self._rest = b""  # the start of an incomplete event; bound: `LARGEST_REPLY` of `answer_delivery.py`
        self.began = False  # some content was received
        self.finished = False  # the reply is complete except for usage and the end mark
        self.done = False  # the end mark was received
        self.error: Any = None

    def events(self, piece: bytes) -> Iterator[bytes]:
        """Yield the events that `piece` completes, each as it is forwarded to the client."""
        scanned = max(0, len(self._rest) - 3)  # the blank line may have begun before `piece`
        data = self._rest + piece if self._rest else piece
        start = 0
        while (end := _event_end(data, max(start, scanned))) > 0:
            event, start = data[start:end], end
            if self._passes(event):
                yield event
        self._rest = data[start:] if start else data

    @property
    def rest(self) -> bytes:
        """The start of an incomplete event."""
        return self._rest

    @property
    def ended(self) -> bool:
        """Whether all following events belong to the end of the reply."""
        return self.finished or self.done or self.error is not None

    @property
    def chunks(self) -> bytes | None:
        """The original chunks as a JSON array, if `render_stream` cannot reproduce them; else None."""
        return None

    def reply(self) -> bytes:
        """Return the content so far, in the form of a reply that was not streamed."""
        try:
            return msgspec.json.encode(self._reply())
        except SHAPE_ERRORS as error:
            return msgspec.json.encode(
                {"error": {"message": f"cannot assemble a reply from the stream: {error}"}}
            )

    @property
    def usage(self) -> ModelUsage:
        raise NotImplementedError

    def _passes(self, event: bytes) -> bool:
        """Process `event`; return whether to forward it to the client."""
        data = extract_data(event)
        if not data:
            return True  # a comment that keeps the connection alive
        try:
            return self._take(data)
        except SHAPE_ERRORS as error:
            self.error = {"message": f"invalid event in the stream: {error}", "type": "stream"}
            return True

    def _take(self, data: bytes) -> bool:
        raise NotImplementedError

    def _reply(self) -> Any:
        raise NotImplementedError


class ChunkStream(EventStream):
    """Reads a stream of a server, and returns its content as chunks of Chat Completions."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[dict[str, Any]] = []  # bound: the chunks of one piece
        self._about: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": ""}

    def read(self, piece: bytes) -> list[dict[str, Any]]:
        """Return the chunks that `piece` completes."""
        for _ in self.events(piece):
            pass
        made, self._made = self._made, []
        return made

    def _emit_delta(self, delta: dict[str, Any], finish: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        self._made.append({**self._about, "choices": [choice]})

    def _emit_usage(self, usage: dict[str, Any]) -> None:
        self._made.append({**self._about, "choices": [], "usage": usage})


def render_event(data: Any, name: str = "") -> bytes:
    """Return an event with `data` as JSON. A `Raw` in it must be a single line."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))


def extract_data(event: bytes) -> bytes:
    """Return the data of a server-sent event, its lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def decode_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in an event's data."""
    return msgspec.json.decode(data, type=dict[str, Any])


def join_values(old: Any, new: Any) -> Any:
    """Join two pieces of a value: texts and lists are concatenated; of other values the later one wins."""
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{k: v if k in _NAMES else join_values(old.get(k), v) for k, v in new.items()}}
    return old if new is None else new


_NAMES = frozenset({"id", "type", "name", "role", "index"})  # repeated, not continued


def _event_end(data: bytes, start: int) -> int:
    """Return the position after the first blank line from `start` on; 0 if there is none."""
    plain = data.find(b"\n\n", start)
    returns = data.find(b"\r\n\r\n", start, plain if plain >= 0 else len(data))
    if returns >= 0:
        return returns + 4
    return plain + 2 if plain >= 0 else 0


# A complete reply is rendered as events from its undecoded values.


def decode_values(reply: bytes) -> Object:
    """Decode a reply without blanks between its values: the data of an event are one line."""
    return msgspec.json.decode(msgspec.json.format(reply, indent=-1), type=Object)


def to_object(value: Raw) -> Object:
    return _OBJECT.decode(value) or {}


def to_objects(values: Raw) -> list[Object]:
    return _OBJECTS.decode(values) or []


def to_text(value: Raw) -> str:
    return _STRING.decode(value) or ""


def empty_fields(value: Object, empty: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` as it is before any content, with the fields of `empty` that it has emptied."""
    return {**value, **{field: nothing for field, nothing in empty.items() if field in value}}


def is_given(value: Object, field: str) -> bool:
    return value.get(field, NULL) != NULL


def is_text(value: Raw) -> bool:
    """Return whether the value is a non-empty text."""
    return bytes(value)[:1] == b'"' and len(value) > 2
