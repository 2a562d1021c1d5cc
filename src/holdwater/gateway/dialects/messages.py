"""Anthropic Messages: content in blocks, usage that adds up along the stream, pings at any time.

Clients move `cache_control` along the conversation: a message is the same with and without it. It needs a
block to stand in, so a text is a block of text for as long as it has one.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import UNREADABLE, Form
from . import Asked, Place, Whole, renamed, told
from .sse import MISSHAPEN, EventStream, joined, mapping

_WORD = b'"cache_control"'
# Of one level and short: what is longer is content, whatever it is called.
_VALUE = re.compile(rb'\s{0,9}:\s{0,9}(?:null|\{(?:[^{}"]{0,9}"[^"\\]{0,32}"){0,8}[^{}"]{0,9}\})')
_COMMA = re.compile(rb"\s{0,9},\s{0,9}")
_TEXT_FIRST = re.compile(rb'"content"\s{0,9}:\s{0,9}\[\s{0,9}\{\s{0,9}"t')
_OPENING = 64  # bytes of a message in which its content begins, where it says little else


def lasting(message: bytes) -> bytes:
    """What stays of `message` when it is sent again: no hints for a cache, and a single text as such."""
    message = _without_hints(message)
    if _TEXT_FIRST.search(message, 0, _OPENING) is None:
        return message
    try:
        content = msgspec.json.decode(message, type=_Content).content
        [block] = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except (*UNREADABLE, ValueError):
        return message
    if block.keys() != {"type", "text"} or bytes(block["type"]) != b'"text"':
        return message
    return message.replace(bytes(content), bytes(block["text"]), 1)


def _without_hints(message: bytes) -> bytes:
    """The bytes of `message` without hints for the upstream's cache; the input of a tool has none."""
    if _WORD not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for given in _inputs(message):
        at = message.index(given, done)
        parts += (without_cache_control(message[done:at]), given)
        done = at + len(given)
    return b"".join((*parts, without_cache_control(message[done:])))


def _inputs(message: bytes) -> list[bytes]:
    """What the tools of `message` are called with, as far as it says `cache_control`."""
    if b'"input"' not in message:
        return []
    try:
        content = msgspec.json.decode(message, type=_Content).content
        blocks = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except UNREADABLE:
        return []
    inputs = [bytes(block["input"]) for block in blocks if "input" in block]
    return [given for given in inputs if _WORD in given]


def without_cache_control(message: bytes) -> bytes:
    """The bytes of `message` without anything that looks like a hint."""
    parts: list[bytes] = []
    done = at = 0
    while (at := message.find(_WORD, at)) >= 0:
        value = _VALUE.match(message, at + len(_WORD))
        if value is None:
            at += len(_WORD)
            continue
        before = message[done:at].rstrip()
        comma = before.endswith(b",")
        parts.append(before[:-1].rstrip() if comma else message[done:at])
        after = None if comma else _COMMA.match(message, value.end())
        done = at = after.end() if after else value.end()
    return b"".join((*parts, message[done:])) if done else message


class _Content(msgspec.Struct):
    content: Raw


class Messages:
    """Implements `Dialect`."""

    form = Form("messages", "messages", lasting=lasting)
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        return Asked(place, renamed(head, model))

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def read_reply(self, body: bytes) -> Whole:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_Reply)
        return Whole(_counted(reply.usage), reply.error)

    def stream(self, asked: Asked) -> MessagesStream:
        return MessagesStream()

    def told(self, reply: bytes) -> list[bytes]:
        return told.messages(reply)


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _Reply(msgspec.Struct):
    usage: Any = None
    error: Any = None


class _Details(msgspec.Struct):
    thinking_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _Details | None = None


def _counted(counts: Any) -> Usage:
    """Here `input_tokens` are those beside the cache; in our record they are all."""
    try:
        usage = msgspec.convert(counts, _Usage)
    except msgspec.ValidationError:
        return Usage(requests=1)
    spent = usage.output_tokens_details
    cached, written = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return Usage(
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
        self._blocks: dict[int, _Block] = {}

    @property
    def usage(self) -> Usage:
        return _counted(self._usage)

    def _take(self, data: bytes) -> bool:
        event = mapping(data)
        kind = event.get("type")
        if kind == "message_start":
            self._message = dict(event["message"])
            self._use(self._message.pop("usage", None))
            self.began = True
        elif kind == "content_block_start":
            self._blocks[int(event["index"])] = _Block(event["content_block"])
        elif kind == "content_block_delta":
            self._blocks[int(event["index"])].take(event["delta"])
        elif kind == "message_delta":
            self._change(event)
        elif kind == "message_stop":
            self.done = True
        elif kind == "error":
            self.error = event.get("error") or event
        return True

    def _change(self, event: dict[str, Any]) -> None:
        self._use(event.pop("usage", None))
        delta = event.pop("delta", None) or {}
        self._message.update({**event, **delta, "type": "message"})
        self.finished = self.finished or delta.get("stop_reason") is not None

    def _use(self, counts: dict[str, Any] | None) -> None:
        """Counts are those up to here: they only grow."""
        for field, value in (counts or {}).items():
            old = self._usage.get(field)
            both = isinstance(old, int) and isinstance(value, int)
            if value is not None or field not in self._usage:
                self._usage[field] = max(old, value) if both else value

    def _reply(self) -> dict[str, Any]:
        content = [self._blocks[index].content() for index in sorted(self._blocks)]
        usage = {"usage": self._usage} if self._usage else {}
        error = {"error": self.error} if self.error is not None else {}
        return {**self._message, "content": content, **usage, **error}


class _Block:
    """One block of a reply that came in deltas."""

    def __init__(self, block: dict[str, Any]) -> None:
        self._fields = dict(block)
        self._texts: dict[str, list[str]] = {}  # field -> its pieces

    def take(self, delta: dict[str, Any]) -> None:
        for field, value in delta.items():
            if field == "type" or value is None:
                continue
            if field == "signature":
                self._fields[field] = value  # said at once, and again rather than on
            elif isinstance(value, str):
                self._texts.setdefault(field, []).append(value)
            elif field == "citation":
                self._fields["citations"] = [*(self._fields.get("citations") or ()), value]
            else:
                self._fields[field] = joined(self._fields.get(field), value)

    def content(self) -> dict[str, Any]:
        texts = {field: "".join(pieces) for field, pieces in self._texts.items()}
        arguments = texts.pop("partial_json", "")
        for field, text in texts.items():
            texts[field] = joined(self._fields.get(field), text)
        return {**self._fields, **texts, **({"input": _parsed(arguments)} if arguments else {})}


def _parsed(arguments: str) -> Any:
    """As JSON; as the text it is where the stream was cut inside it."""
    try:
        return msgspec.json.decode(arguments, type=Raw)
    except MISSHAPEN:
        return arguments
