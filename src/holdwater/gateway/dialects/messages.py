"""Anthropic Messages: content in blocks, usage that accumulates along the stream, pings at any time.

Clients move `cache_control` along the conversation: a message is the same with and without it. It needs a
block as its parent, so clients turn a text into a text block while the hint is on it.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..request_parser import DECODE_ERRORS, RequestForm
from . import AdaptedRequest, ParsedReply, RequestTarget, as_stream, impose_model
from .sse import SHAPE_ERRORS, EventStream, decode_object, join_values

_CACHE_CONTROL = b'"cache_control"'
# One level deep and short: a longer value is content, even under this key.
_VALUE = re.compile(rb'\s{0,9}:\s{0,9}(?:null|\{(?:[^{}"]{0,9}"[^"\\]{0,32}"){0,8}[^{}"]{0,9}\})')
_COMMA = re.compile(rb"\s{0,9},\s{0,9}")
_TEXT_FIRST = re.compile(rb'"content"\s{0,9}:\s{0,9}\[\s{0,9}\{\s{0,9}"t')
_OPENING = 64  # bytes of a message within which its content begins, if it has few other keys


def strip_transient(message: bytes) -> bytes:
    """Return the stable form of `message`: without cache hints, and a single text block as a text."""
    message = _strip_hints(message)
    if _TEXT_FIRST.search(message, 0, _OPENING) is None:
        return message
    try:
        content = msgspec.json.decode(message, type=_MessagesContent).content
        [block] = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except (*DECODE_ERRORS, ValueError):
        return message
    if block.keys() != {"type", "text"} or bytes(block["type"]) != b'"text"':
        return message
    return message.replace(bytes(content), bytes(block["text"]), 1)


def _strip_hints(message: bytes) -> bytes:
    """Return the bytes of `message` without cache hints; the inputs of tools are left as they are."""
    if _CACHE_CONTROL not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for given in _find_inputs(message):
        at = message.index(given, done)
        parts += (strip_cache_control(message[done:at]), given)
        done = at + len(given)
    return b"".join((*parts, strip_cache_control(message[done:])))


def _find_inputs(message: bytes) -> list[bytes]:
    """Return the inputs of the tool calls in `message` that contain `cache_control`."""
    if b'"input"' not in message:
        return []
    try:
        content = msgspec.json.decode(message, type=_MessagesContent).content
        blocks = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except DECODE_ERRORS:
        return []
    inputs = [bytes(block["input"]) for block in blocks if "input" in block]
    return [given for given in inputs if _CACHE_CONTROL in given]


def strip_cache_control(message: bytes) -> bytes:
    """Return the bytes of `message` without anything that looks like a cache hint."""
    parts: list[bytes] = []
    done = at = 0
    while (at := message.find(_CACHE_CONTROL, at)) >= 0:
        value = _VALUE.match(message, at + len(_CACHE_CONTROL))
        if value is None:
            at += len(_CACHE_CONTROL)
            continue
        before = message[done:at].rstrip()
        comma = before.endswith(b",")
        parts.append(before[:-1].rstrip() if comma else message[done:at])
        after = None if comma else _COMMA.match(message, value.end())
        done = at = after.end() if after else value.end()
    return b"".join((*parts, message[done:])) if done else message


class _MessagesContent(msgspec.Struct):
    content: Raw


class MessagesDialect:
    """Implements `Dialect`."""

    form = RequestForm("messages", "messages", strip_transient=strip_transient)
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return AdaptedRequest(place, impose_model(head, model))

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def read_reply(self, body: bytes) -> ParsedReply:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_MessagesReply)
        return ParsedReply(_count_usage(reply.usage), reply.error)

    def stream(self, asked: AdaptedRequest) -> MessagesStream:
        return MessagesStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return as_stream.render_messages(reply)


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _MessagesReply(msgspec.Struct):
    usage: Any = None
    error: Any = None


class _MessagesDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class _MessagesUsage(msgspec.Struct):
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _MessagesDetails | None = None


def _count_usage(counts: Any) -> ModelUsage:
    """Return the usage. Anthropic's `input_tokens` exclude cached tokens; in the record they include them."""
    try:
        usage = msgspec.convert(counts, _MessagesUsage)
    except msgspec.ValidationError:
        return ModelUsage(requests=1)
    spent = usage.output_tokens_details
    cached, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return ModelUsage(
        requests=1,
        input_tokens=(usage.input_tokens or 0) + cached + written,
        cached_tokens=cached,
        written_tokens=written,
        output_tokens=usage.output_tokens or 0,
        reasoning_tokens=(spent.thinking_tokens or 0) if spent else 0,
    )


class MessagesStream(EventStream):
    def __init__(self) -> None:
        super().__init__()
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[int, _BlockAssembly] = {}

    @property
    def usage(self) -> ModelUsage:
        return _count_usage(self._usage)

    def _take(self, data: bytes) -> bool:
        event = decode_object(data)
        kind = event.get("type")
        if kind == "message_start":
            self._message = dict(event["message"])
            self._add_usage(self._message.pop("usage", None))
            self.began = True
        elif kind == "content_block_start":
            self._blocks[int(event["index"])] = _BlockAssembly(event["content_block"])
        elif kind == "content_block_delta":
            self._blocks[int(event["index"])].take(event["delta"])
        elif kind == "message_delta":
            self._take_delta(event)
        elif kind == "message_stop":
            self.done = True
        elif kind == "error":
            self.error = event.get("error") or event
        return True

    def _take_delta(self, event: dict[str, Any]) -> None:
        self._add_usage(event.pop("usage", None))
        delta = event.pop("delta", None) or {}
        self._message.update({**event, **delta, "type": "message"})
        self.finished = self.finished or delta.get("stop_reason") is not None

    def _add_usage(self, counts: dict[str, Any] | None) -> None:
        """Merge cumulative counts: they only grow."""
        for field, value in (counts or {}).items():
            old = self._usage.get(field)
            both = isinstance(old, int) and isinstance(value, int)
            if value is not None or field not in self._usage:
                self._usage[field] = max(old, value) if both else value

    def _reply(self) -> dict[str, Any]:
        content = [self._blocks[index].build_block() for index in sorted(self._blocks)]
        usage = {"usage": self._usage} if self._usage else {}
        error = {"error": self.error} if self.error is not None else {}
        return {**self._message, "content": content, **usage, **error}


class _BlockAssembly:
    """One block of a reply that came in deltas."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._fields = dict(block)
        self._texts: dict[str, list[str]] = {}  # field -> its pieces

    def take(self, delta: dict[str, Any]) -> None:
        for field, value in delta.items():
            if field == "type" or value is None:
                continue
            if field == "signature":
                self._fields[field] = value  # sent whole; a later one replaces it
            elif isinstance(value, str):
                self._texts.setdefault(field, []).append(value)
            elif field == "citation":
                self._fields["citations"] = [*(self._fields.get("citations") or ()), value]
            else:
                self._fields[field] = join_values(self._fields.get(field), value)

    def build_block(self) -> dict[str, Any]:
        texts = {field: "".join(pieces) for field, pieces in self._texts.items()}
        arguments = texts.pop("partial_json", "")
        for field, text in texts.items():
            texts[field] = join_values(self._fields.get(field), text)
        return {**self._fields, **texts, **({"input": _parse_arguments(arguments)} if arguments else {})}


def _parse_arguments(arguments: str) -> Any:
    """Return the arguments as JSON, or as text if the stream was cut inside them."""
    try:
        return msgspec.json.decode(arguments, type=Raw)
    except SHAPE_ERRORS:
        return arguments
