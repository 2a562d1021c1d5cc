"""How records become bytes and bytes records: JSON, msgpack, server-sent events, frames.

Nothing is read from a connection here: that is `body.py`; what is written to one goes through `written.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.errors import Refused
from ..core.serving import PROTOCOL, AnyEvent, Order

JSON = "application/json"
MSGPACK = "application/msgpack"
EVENTS = "text/event-stream"
FRAMES = "application/x-msgpack-stream"

STATUS = {  # by a problem's code
    "invalid": 400,
    "version": 400,
    "unauthorized": 401,
    "foreign": 403,
    "unknown": 404,
    "conflict": 409,
    "gone": 409,
    "too_large": 413,
    "content_type": 415,
    "misdirected": 421,
    "busy": 429,
    "internal": 500,
    "draining": 503,
    "broken": 503,
}


class Speech(NamedTuple):
    """In what form a client speaks, and wants to be answered."""

    packed_in: bool  # msgpack, not JSON
    packed_out: bool
    streamed: bool

    @property
    def kind(self) -> str:
        """The content type of a document."""
        return MSGPACK if self.packed_out else JSON

    @property
    def stream_kind(self) -> str:
        return FRAMES if self.packed_out else EVENTS

    def encode(self, document: Any) -> bytes:
        return _packed.encode(document) if self.packed_out else _json.encode(document)

    def frame(self, event: AnyEvent) -> tuple[bytes, bytes, bytes]:
        """What comes before an event in a stream, the event, and what comes after it."""
        body = self.encode(event)
        if self.packed_out:
            return len(body).to_bytes(4, "big"), body, b""
        return f"event: {event.__struct_config__.tag}\ndata: ".encode(), body, b"\n\n"

    @property
    def keep_alive(self) -> bytes:
        """What says in a stream that there is nothing to say."""
        return bytes(4) if self.packed_out else b": still here\n\n"

    def decode(self, body: bytes | bytearray, kind: Any) -> Any:
        """The record in `body`; Refused names the field that is wrong."""
        try:
            if self.packed_in:
                return msgspec.msgpack.decode(body, type=kind)
            return msgspec.json.decode(body, type=kind)
        except (ValueError, OverflowError) as error:  # msgspec's own errors are among these
            raise Refused("invalid", f"the body cannot be read: {error}") from None
        except RecursionError:
            raise Refused("invalid", "the body cannot be read: it is nested too deeply") from None

    def decode_order(self, body: bytes | bytearray) -> Order:
        """An order in this protocol; another protocol's may have fields that are unknown here."""
        try:
            order: Order = self.decode(body, Order)
        except Refused:
            self._check_version(self.decode(body, _Versioned).protocol)
            raise
        self._check_version(order.protocol)
        return order

    def _check_version(self, protocol: int) -> None:
        if protocol != PROTOCOL:
            raise Refused(
                "version",
                f"the order is in protocol {protocol}, this server speaks {PROTOCOL}",
                "use the client of the server's own version of holdwater",
            )


def speech_of(headers: Mapping[str, str]) -> Speech:
    """By `Accept`, and by `Content-Type` where that leaves it open; JSON where nothing is said."""
    packed_in = _kind(headers.get("Content-Type", "")) == MSGPACK
    for said in headers.get("Accept", "").split(","):
        match _kind(said):
            case "application/x-msgpack-stream":
                return Speech(packed_in, packed_out=True, streamed=True)
            case "text/event-stream":
                return Speech(packed_in, packed_out=False, streamed=True)
            case "application/msgpack":
                return Speech(packed_in, packed_out=True, streamed=False)
            case "application/json":
                return Speech(packed_in, packed_out=False, streamed=False)
    return Speech(packed_in, packed_out=packed_in, streamed=False)


def _kind(said: str) -> str:
    return said.partition(";")[0].strip().lower()


class _Versioned(msgspec.Struct):
    protocol: int = PROTOCOL


_json = msgspec.json.Encoder()
_packed = msgspec.msgpack.Encoder()
