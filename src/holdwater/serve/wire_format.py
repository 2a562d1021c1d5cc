"""Encodes and decodes the records of the serving protocol: JSON, msgpack, server-sent events, binary frames.

It does no I/O: `request_bodies.py` reads from connections, `responses.py` writes to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.errors import RequestRefused
from ..core.serving_protocol import PROTOCOL, AnyOrderEvent, Order

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


class WireFormat(NamedTuple):
    """The formats of a client's request and of its response."""

    packed_in: bool  # msgpack, not JSON
    packed_out: bool
    streamed: bool

    @property
    def content_type(self) -> str:
        """The content type of a response that is not streamed."""
        return MSGPACK if self.packed_out else JSON

    @property
    def stream_type(self) -> str:
        return FRAMES if self.packed_out else EVENTS

    def encode(self, document: Any) -> bytes:
        return _packed.encode(document) if self.packed_out else _json.encode(document)

    def frame(self, event: AnyOrderEvent) -> tuple[bytes, bytes, bytes]:
        """Encode an event for a stream; return the bytes before its body, the body, and the bytes after."""
        body = self.encode(event)
        if self.packed_out:
            return len(body).to_bytes(4, "big"), body, b""
        return f"event: {event.__struct_config__.tag}\ndata: ".encode(), body, b"\n\n"

    @property
    def keep_alive(self) -> bytes:
        """The bytes of a keep-alive in a stream."""
        return bytes(4) if self.packed_out else b": still here\n\n"

    def decode(self, body: bytes | bytearray, kind: Any) -> Any:
        """Decode the record in `body`; raise `RequestRefused`, which names the invalid field."""
        try:
            if self.packed_in:
                return msgspec.msgpack.decode(body, type=kind)
            return msgspec.json.decode(body, type=kind)
        except (ValueError, OverflowError) as error:  # includes msgspec's own errors
            raise RequestRefused("invalid", f"the body cannot be read: {error}") from None
        except RecursionError:
            raise RequestRefused("invalid", "the body cannot be read: it is nested too deeply") from None

    def decode_order(self, body: bytes | bytearray) -> Order:
        """Decode an order. On failure check its protocol first: another version may have other fields."""
        try:
            order: Order = self.decode(body, Order)
        except RequestRefused:
            self._check_version(self.decode(body, _VersionProbe).protocol)
            raise
        self._check_version(order.protocol)
        return order

    def _check_version(self, protocol: int) -> None:
        if protocol != PROTOCOL:
            raise RequestRefused(
                "version",
                f"unsupported protocol version {protocol} (this server supports {PROTOCOL})",
                "use the client from the server's version of holdwater",
            )


def negotiate_format(headers: Mapping[str, str]) -> WireFormat:
    """Choose the formats by `Accept`, then by `Content-Type`; JSON if neither names one."""
    packed_in = _media_type(headers.get("Content-Type", "")) == MSGPACK
    for said in headers.get("Accept", "").split(","):
        match _media_type(said):
            case "application/x-msgpack-stream":
                return WireFormat(packed_in, packed_out=True, streamed=True)
            case "text/event-stream":
                return WireFormat(packed_in, packed_out=False, streamed=True)
            case "application/msgpack":
                return WireFormat(packed_in, packed_out=True, streamed=False)
            case "application/json":
                return WireFormat(packed_in, packed_out=False, streamed=False)
    return WireFormat(packed_in, packed_out=packed_in, streamed=False)


def _media_type(said: str) -> str:
    return said.partition(";")[0].strip().lower()


class _VersionProbe(msgspec.Struct):
    protocol: int = PROTOCOL


_json = msgspec.json.Encoder()
_packed = msgspec.msgpack.Encoder()
