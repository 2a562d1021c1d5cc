"""OpenAI Responses: items in, items out. The event that ends a stream holds the whole reply.

`input` is a list of items or a text. A request may name what it goes on with, a reply or a conversation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import Usage
from ..recorder import UNREADABLE, Form
from ..reply_chain import Chaining, ChainName
from . import COMMENT, Asked, Place, Whole, renamed, told
from .chat import Chat
from .sse import EventStream

_NULL = Raw(b"null")
# What Codex puts above the output of a command.
_MADE_UP = re.compile(rb"(?:Chunk ID: [0-9a-f]+|Wall time: [0-9.]+ seconds?)\\n")
LONGEST_REFERENCE = 512  # bytes
_REFERENCE = frozenset({"id", "type"})  # the keys of an `item_reference`
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


def steady(item: bytes) -> bytes:
    """An item without its id, which a client may have made up, and without how long a command took.

    The id of a reference to an earlier item is all that it says.
    """
    if b'"id"' in item:
        try:
            fields = _OBJECT.decode(item)
        except UNREADABLE:
            return item
        if fields.keys() <= _REFERENCE:
            return item
        fields.pop("id", None)
        item = msgspec.json.encode(fields)
    return _MADE_UP.sub(b"", item) if b'"function_call_output"' in item else item


def chain_name(head: Mapping[str, Raw]) -> ChainName | None:
    """The reply, or else the conversation, that a request goes on with."""
    for key, stays in (("previous_response_id", False), ("conversation", True)):
        value = msgspec.json.decode(head.get(key, _NULL))
        name = value.get("id") if isinstance(value, dict) else value
        if isinstance(name, str) and name:
            return ChainName(name, stays)
    return None


def reply_name(reply: bytes) -> str:
    """The id of a reply."""
    name = msgspec.json.decode(reply, type=_Reply).id
    return name if isinstance(name, str) else ""


def output_items(reply: bytes) -> list[bytes]:
    """The items of a reply, each as its client would send it back."""
    try:
        return [bytes(item) for item in msgspec.json.decode(reply, type=_Output).output]
    except UNREADABLE:
        return []


def item_name(item: bytes) -> str:
    """The id of an item."""
    try:
        name = msgspec.json.decode(item, type=_Item).id
    except UNREADABLE:
        return ""
    return name if isinstance(name, str) else ""


def reference_name(item: bytes) -> str:
    """The id of the item that a reference stands for; empty for any other item."""
    if len(item) > LONGEST_REFERENCE or b'"id"' not in item:
        return ""
    try:
        fields = _OBJECT.decode(item)
    except UNREADABLE:
        return ""
    return item_name(item) if fields.keys() <= _REFERENCE else ""


class Responses:
    """Implements `Dialect`."""

    form = Form(
        "responses",
        "input",
        optional=True,
        steady=steady,
        chaining=Chaining(chain_name, reply_name, output_items, item_name, reference_name),
    )
    keep_alive = COMMENT
    error_body = Chat.error_body

    def ask(self, head: dict[str, Raw], place: Place, model: str | None) -> Asked:
        return Asked(place, renamed(head, model))

    def read_reply(self, body: bytes) -> Whole:
        if not body.isascii():
            body.decode()
        reply = msgspec.json.decode(body, type=_Reply)
        return Whole(_counted(reply.usage), reply.error)

    def stream(self, asked: Asked) -> ResponsesStream:
        return ResponsesStream()

    def told(self, reply: bytes) -> list[bytes]:
        return told.responses(reply)


class _Output(msgspec.Struct):
    output: list[Raw]


class _Item(msgspec.Struct):
    id: Any = None


class _Reply(msgspec.Struct):
    id: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


def _counted(counts: Any) -> Usage:
    try:
        usage = msgspec.convert(counts, _Usage)
    except msgspec.ValidationError:
        return Usage(requests=1)
    details, spent = usage.input_tokens_details, usage.output_tokens_details
    return Usage(
        requests=1,
        input_tokens=usage.input_tokens or 0,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.output_tokens or 0,
        reasoning_tokens=(spent.reasoning_tokens or 0) if spent else 0,
    )


class _Event(msgspec.Struct):
    type: str = ""
    response: Raw = _NULL
    item: Raw = _NULL
    output_index: int = 0
    delta: Any = None
    error: Any = None
    message: Any = None
    code: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


class ResponsesStream(EventStream):
    """Keeps finished items as they came, and of an unfinished one its pieces: a stream may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self._envelope = b"{}"
        self._final: bytes | None = None
        self._usage: Any = None
        self._items: dict[int, bytes] = {}  # by place in the output
        self._pieces: dict[int, dict[str, list[str]]] = {}  # of items that are not finished, by kind

    @property
    def usage(self) -> Usage:
        return _counted(self._usage)

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

    def _end(self, event: _Event) -> None:
        reply = msgspec.json.decode(event.response, type=_Reply)
        self._final = bytes(event.response)
        self._usage = reply.usage
        if event.type == "response.failed":
            self.error = reply.error or {"message": "the response failed"}
        self.done = True

    def _reply(self) -> Any:
        reply = _OBJECT.decode(self._envelope if self._final is None else self._final)
        if self._final is not None and (bytes(reply.get("output", b"[]")) != b"[]" or not self._items):
            return Raw(self._final)
        output = [self._item(place) for place in sorted(self._items)]
        error = {"error": self.error} if self.error is not None else {}
        return {**reply, "output": output, **error}

    def _item(self, place: int) -> Any:
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
