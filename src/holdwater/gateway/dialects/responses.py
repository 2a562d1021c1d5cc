"""OpenAI Responses: items in, items out. The event that ends a stream holds the complete reply.

`input` is a list of items or a text. A request may name the reply or the conversation that it continues.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..reply_chain import ChainName, ChainRules
from ..request_parser import DECODE_ERRORS, RequestForm
from . import KEEP_ALIVE_COMMENT, AdaptedRequest, ParsedReply, RequestTarget, as_stream, impose_model
from .chat import ChatDialect
from .sse import EventStream

_NULL = Raw(b"null")
# Lines that Codex puts above the output of a command.
_GENERATED = re.compile(rb"(?:Chunk ID: [0-9a-f]+|Wall time: [0-9.]+ seconds?)\\n")
LONGEST_REFERENCE = 512  # bytes
_REFERENCE = frozenset({"id", "type"})  # the keys of an `item_reference`
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def strip_generated(item: bytes) -> bytes:
    """Return an item without its id, which a client may have generated, and without a command's duration.

    A reference to an earlier item keeps its id, which is its only content.
    """
    if b'"id"' in item:
        try:
            fields = _OBJECT.decode(item)
        except DECODE_ERRORS:
            return item
        if fields.keys() <= _REFERENCE:
            return item
        fields.pop("id", None)
        item = msgspec.json.encode(fields)
    return _GENERATED.sub(b"", item) if b'"function_call_output"' in item else item


def read_chain_name(head: Mapping[str, Raw]) -> ChainName | None:
    """Return the name of the reply, or else of the conversation, that a request continues."""
    for key, stays in (("previous_response_id", False), ("conversation", True)):
        value = msgspec.json.decode(head.get(key, _NULL))
        name = value.get("id") if isinstance(value, dict) else value
        if isinstance(name, str) and name:
            return ChainName(name, stays)
    return None


def read_reply_name(reply: bytes) -> str:
    """Return the id of a reply."""
    name = msgspec.json.decode(reply, type=_ResponsesReply).id
    return name if isinstance(name, str) else ""


def read_output_items(reply: bytes) -> list[bytes]:
    """Return the items of a reply, each as its client would send it back."""
    try:
        return [bytes(item) for item in msgspec.json.decode(reply, type=_ResponsesOutput).output]
    except DECODE_ERRORS:
        return []


def read_item_name(item: bytes) -> str:
    """Return the id of an item."""
    try:
        name = msgspec.json.decode(item, type=_ResponsesItem).id
    except DECODE_ERRORS:
        return ""
    return name if isinstance(name, str) else ""


def read_reference_name(item: bytes) -> str:
    """Return the id of the item that a reference refers to; empty for any other item."""
    if len(item) > LONGEST_REFERENCE or b'"id"' not in item:
        return ""
    try:
        fields = _OBJECT.decode(item)
    except DECODE_ERRORS:
        return ""
    return read_item_name(item) if fields.keys() <= _REFERENCE else ""


class ResponsesDialect:
    """Implements `Dialect`."""

    form = RequestForm(
        "responses",
        "input",
        optional=True,
        strip_generated=strip_generated,
        chaining=ChainRules(
            read_chain_name, read_reply_name, read_output_items, read_item_name, read_reference_name
        ),
    )
    keep_alive = KEEP_ALIVE_COMMENT
    error_body = ChatDialect.error_body

    def adapt_request(self, head: dict[str, Raw], place: RequestTarget, model: str | None) -> AdaptedRequest:
        return AdaptedRequest(place, impose_model(head, model))

    def read_reply(self, body: bytes) -> ParsedReply:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_ResponsesReply)
        return ParsedReply(_count_usage(reply.usage), reply.error)

    def stream(self, asked: AdaptedRequest) -> ResponsesStream:
        return ResponsesStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return as_stream.render_responses(reply)


class _ResponsesOutput(msgspec.Struct):
    output: list[Raw]


class _ResponsesItem(msgspec.Struct):
    id: Any = None


class _ResponsesReply(msgspec.Struct):
    id: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None


class _ResponsesDetails(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _ResponsesDetails | None = None
    output_tokens_details: _ResponsesDetails | None = None


def _count_usage(counts: Any) -> ModelUsage:
    try:
        usage = msgspec.convert(counts, _ResponsesUsage)
    except msgspec.ValidationError:
        return ModelUsage(requests=1)
    details, spent = usage.input_tokens_details, usage.output_tokens_details
    return ModelUsage(
        requests=1,
        input_tokens=usage.input_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.output_tokens or 0,
        reasoning_tokens=(spent.reasoning_tokens or 0) if spent else 0,
    )


class _ResponsesEvent(msgspec.Struct):
    type: str = ""
    response: Raw = _NULL
    item: Raw = _NULL
    output_index: int = 0
    delta: Any = None
    error: Any = None
    message: Any = None
    code: Any = None


_EVENT = msgspec.json.Decoder(_ResponsesEvent)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


class ResponsesStream(EventStream):
    """Keeps finished items as received, and the pieces of unfinished ones: a stream may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self._envelope = b"{}"
        self._final: bytes | None = None
        self._usage: Any = None
        self._items: dict[int, bytes] = {}  # by position in the output
        self._pieces: dict[int, dict[str, list[str]]] = {}  # of unfinished items, by kind

    @property
    def usage(self) -> ModelUsage:
        return _count_usage(self._usage)

    def _take(self, data: bytes) -> bool:
        event = _EVENT.decode(data)
        place = event.output_index
        self.began = self.began or bool(event.type)
        if event.type in _TERMINAL:
            self._end(event)
        elif event.type == "error":
            self.error = event.error or {"message": event.message, "code": event.code}
            self.done = True
        elif event.type == "response.created":
            self._envelope = bytes(event.response)
        elif event.type in ("response.output_item.added", "response.output_item.done"):
            self._items[place] = bytes(event.item)
            self._pieces.pop(place, None)
        elif isinstance(event.delta, str):
            kind = event.type.removeprefix("response.").removesuffix(".delta")
            self._pieces.setdefault(place, {}).setdefault(kind, []).append(event.delta)
        return True

    def _end(self, event: _ResponsesEvent) -> None:
        reply = msgspec.json.decode(event.response, type=_ResponsesReply)
        self._final = bytes(event.response)
        self._usage = reply.usage
        if event.type == "response.failed":
            self.error = reply.error or {"message": "the response failed"}
        self.done = True

    def _reply(self) -> Any:
        reply = _OBJECT.decode(self._envelope if self._final is None else self._final)
        if self._final is not None and (bytes(reply.get("output", b"[]")) != b"[]" or not self._items):
            return Raw(self._final)
        output = [self._build_item(place) for place in sorted(self._items)]
        error = {"error": self.error} if self.error is not None else {}
        return {**reply, "output": output, **error}

    def _build_item(self, place: int) -> Any:
        pieces = {kind: "".join(texts) for kind, texts in self._pieces.get(place, {}).items()}
        if not pieces:
            return Raw(self._items[place])
        item: dict[str, Any] = dict(_OBJECT.decode(self._items[place]))
        for kind, text in pieces.items():
            if kind in _PARTS:
                field, name, part = _PARTS[kind]
                item[field] = [{"type": part, name: text}]
            elif kind in _FIELDS:
                item[_FIELDS[kind]] = text
        return item


_PARTS = {  # kind of delta -> field of the item, field of its part, type of the part
    "output_text": ("content", "text", "output_text"),
    "refusal": ("content", "refusal", "refusal"),
    "reasoning_text": ("content", "text", "reasoning_text"),
    "reasoning_summary_text": ("summary", "text", "summary_text"),
}
_FIELDS = {"function_call_arguments": "arguments", "custom_tool_call_input": "input"}
