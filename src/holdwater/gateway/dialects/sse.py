"""Server-sent events: where one ends, what its data are, how one is written.

What they mean is for the dialects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

# What taking foreign JSON apart raises when it is not shaped as promised.
MISSHAPEN = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    RecursionError,
)


class EventStream:
    """The part of a `Stream` that all dialects share. Each says in `_take` what an event's data mean."""

    def __init__(self) -> None:
        self._rest = b""  # the start of an event that has not ended: bounded by the relay
        self.began = False
        self.finished = False  # the reply is complete but for usage and the end mark
        self.done = False
        self.error: Any = None

    def events(self, piece: bytes) -> Iterator[bytes]:
        """The events that `piece` completes, each as it goes on to the client."""
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
        """The start of an event whose end has not come."""
        return self._rest

    @property
    def ended(self) -> bool:
        """From here on, what comes ends the reply."""
        return self.finished or self.done or self.error is not None

    @property
    def chunks(self) -> bytes | None:
        """What came, piece by piece, where `told` cannot say it so again: a JSON array."""
        return None

    def reply(self) -> bytes:
        """What came, in the shape of a reply that was not streamed."""
        try:
            return msgspec.json.encode(self._reply())
        except MISSHAPEN as error:
            return msgspec.json.encode({"error": {"message": f"the stream makes no reply: {error}"}})

    def _passes(self, event: bytes) -> bool:
        """Take `event` in; should it go on to the client?"""
        data = data_of(event)
        if not data:
            return True  # a comment that keeps the connection alive
        try:
            return self._take(data)
        except MISSHAPEN as error:
            self.error = {"message": f"an event of the stream is no chunk: {error}", "type": "stream"}
            return True

    def _take(self, data: bytes) -> bool:
        raise NotImplementedError

    def _reply(self) -> Any:
        raise NotImplementedError


def event(data: Any, name: str = "") -> bytes:
    """`data` as JSON in an event. A `Raw` among them has to be of one line."""
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", msgspec.json.encode(data), b"\n\n"))


def data_of(event: bytes) -> bytes:
    """The data of a server-sent event, its lines joined; empty for a comment."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2 and b"\r" not in event:
        return event[6:-2]
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def mapping(data: bytes) -> dict[str, Any]:
    """The JSON object in an event's data."""
    return msgspec.json.decode(data, type=dict[str, Any])


def joined(old: Any, new: Any) -> Any:
    """What two pieces of a value make: texts and lists follow each other, of others the later stands."""
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{k: v if k in _NAMES else joined(old.get(k), v) for k, v in new.items()}}
    return old if new is None else new


_NAMES = frozenset({"id", "type", "name", "role", "index"})  # said again, not continued


def _event_end(data: bytes, start: int) -> int:
    """The position after the first blank line from `start` on; 0 while there is none."""
    plain = data.find(b"\n\n", start)
    returns = data.find(b"\r\n\r\n", start, plain if plain >= 0 else len(data))
    if returns >= 0:
        return returns + 4
    return plain + 2 if plain >= 0 else 0
