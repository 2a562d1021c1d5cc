"""Encodes, decodes and validates the records of the serving protocol, in JSON, msgpack, events and frames.

It does no I/O: `bodies.py` reads from connections and writes to them. A request with an impossible value, or
with a value that only the server may set, is refused: an instance that a client sends gets no access to the
server's machine. `run/orders/order_book.py` decides whether there is capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.errors import RequestRefused
from ..core.groups import GroupTerms
from ..core.input_checks import find_bad_paths, find_url_problem
from ..core.records import Instance, LimitOverrides, Network, SandboxSpec
from ..core.serving_protocol import PROTOCOL, AnyOrderEvent, Order, SteerRequest

JSON = "application/json"
MSGPACK = "application/msgpack"
EVENTS = "text/event-stream"
FRAMES = "application/x-msgpack-stream"
KEY_HINT = "the key of an endpoint is sent in the header `X-Holdwater-Model-Key`"

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


def check_order(order: Order) -> None:
    """Raise `RequestRefused` (`invalid`), which names the field, for the first invalid field of an order."""
    for field, problem in _find_problems(order):
        raise RequestRefused("invalid", f"`{field}` {problem}", KEY_HINT if field == "model.url" else "")


def check_steer(to: SteerRequest) -> None:
    """Raise `RequestRefused` (`invalid`) for an invalid URL."""
    if problem := find_url_problem(to.url):
        raise RequestRefused("invalid", f"`url` {problem}", KEY_HINT)


def _find_problems(order: Order) -> Iterator[tuple[str, str]]:
    yield from _check_limits(order.limits, "limits")
    if order.group is not None:
        yield from _check_group(order.group)
    if order.model.url is not None and (problem := find_url_problem(order.model.url)):
        yield "model.url", problem
    try:
        msgspec.json.encode(order.sampling)
    except (TypeError, ValueError) as error:
        yield "sampling", f"cannot be encoded as JSON: {error}"
    if isinstance(order.instance, Instance):
        yield from _check_instance(order.instance)


def _check_limits(ask: LimitOverrides, place: str) -> Iterator[tuple[str, str]]:
    for name in ask.__struct_fields__:
        value = getattr(ask, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            yield f"{place}.{name}", f"must be more than 0: {value:g}"


def _check_group(terms: GroupTerms) -> Iterator[tuple[str, str]]:
    for name, lowest in {"replace": 0, "least": 0, "quorum": 1, "patience": 0}.items():
        value = getattr(terms, name)
        if value is not None and not (value >= lowest and math.isfinite(value)):
            yield f"group.{name}", f"must be at least {lowest}: {value:g}"


def _check_instance(instance: Instance) -> Iterator[tuple[str, str]]:
    yield from _check_limits(instance.limits, "instance.limits")
    if instance.directory is not None:
        yield "instance.directory", "is a path on the server: send `files`"
    for place, start in (("start", instance.start), ("grader", instance.grader)):
        if start is not None:
            yield from _check_start(start, f"instance.{place}")


def _check_start(start: SandboxSpec, place: str) -> Iterator[tuple[str, str]]:
    for field, problem in find_bad_paths(start):
        yield f"{place}.{field}", problem
    if start.build is not None:
        yield f"{place}.build", "is a directory on the server: name an `image`"
    if start.network is Network.OPEN:
        yield f"{place}.network", "can be opened only by the server: `--network open`"
    if any("${" in value for value in start.env.values()):
        yield f"{place}.env", "must not refer to variables of the server"


_json = msgspec.json.Encoder()
_packed = msgspec.msgpack.Encoder()
