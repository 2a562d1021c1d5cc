"""Streams of OpenAI Responses: reads their events, and renders a complete reply as events.

The event that ends a stream holds the complete reply.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..conversion import CompletionCall, CompletionContent, pick_token_fields
from ..interface import read_counts
from ..openai import TokenDetails
from ..sse import (
    NULL,
    EventStream,
    Object,
    decode_values,
    empty_fields,
    is_given,
    is_text,
    render_event,
    to_objects,
    to_text,
)
from ..stream_writer import TEXT, Events, OpenPart, StreamWriter

Place = dict[str, Any]  # the fields of an event that say which text it belongs to
_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesReply(msgspec.Struct):
    id: Any = None
    usage: Any = None
    error: Any = None
    output: Any = None


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None


def count_usage(counts: Any) -> ModelUsage:
    usage = read_counts(counts, _ResponsesUsage)
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
    response: Raw = NULL
    item: Raw = NULL
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
        return count_usage(self._usage)

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
        reply = msgspec.json.decode(event.response, type=ResponsesReply)
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


def render_events(reply: bytes) -> list[bytes]:
    """Return the events of each item with its parts, and at the end the reply itself."""
    whole = decode_values(reply)
    status = to_text(whole.get("status", NULL))
    end = status if status in ("incomplete", "failed") else "completed"
    begun = empty_fields(whole, _RESPONSE_BEGUN)
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for place, item in enumerate(to_objects(whole.get("output", NULL))):
        events += _item_events(place, item)
    events.append({"type": f"response.{end}", "response": whole})
    return [render_event({**data, "sequence_number": n}, data["type"]) for n, data in enumerate(events)]


_RESPONSE_BEGUN: Mapping[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "error": None,
    "incomplete_details": None,
    "completed_at": None,
    "prompt_token_ids": [],
    "token_ids": [],
    "logprobs": None,
}
_ITEM_TEXTS = {  # type of an item -> its field that comes in deltas, and the name of the deltas
    "function_call": {"arguments": "response.function_call_arguments"},
    "custom_tool_call": {"input": "response.custom_tool_call_input"},
    "mcp_call": {"arguments": "response.mcp_call_arguments"},
}
_ITEM_PARTS = {  # type of an item -> its fields that come in parts: event name and index field
    "message": {"content": ("response.content_part", "content_index")},
    "reasoning": {
        "summary": ("response.reasoning_summary_part", "summary_index"),
        "content": ("response.content_part", "content_index"),
    },
}
_PART_TEXTS = {  # type of a part -> its field that comes in deltas, and the name of the deltas
    "output_text": {"text": "response.output_text"},
    "refusal": {"refusal": "response.refusal"},
    "reasoning_text": {"text": "response.reasoning_text"},
    "summary_text": {"text": "response.reasoning_summary_text"},
}


def _item_events(place: int, item: Object) -> Iterator[dict[str, Any]]:
    """Yield the events of an item; an item of unknown type is only added and done."""
    kind = to_text(item.get("type", NULL))
    where = {"item_id": item.get("id", ""), "output_index": place}
    parts = {field: names for field, names in _ITEM_PARTS.get(kind, {}).items() if is_given(item, field)}
    texts = {field: name for field, name in _ITEM_TEXTS.get(kind, {}).items() if is_given(item, field)}
    empty = {"status": "in_progress", **dict.fromkeys(parts, ()), **dict.fromkeys(texts, "")}
    yield {"type": "response.output_item.added", "output_index": place, "item": empty_fields(item, empty)}
    for field, (name, number) in parts.items():
        for n, part in enumerate(to_objects(item[field])):
            yield from _part_events(part, name, {**where, number: n})
    for field, name in texts.items():
        delta, done = _text_events(name, field, item[field], where)
        yield from delta
        yield {**done, **({"name": item["name"]} if kind == "function_call" and "name" in item else {})}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _part_events(part: Object, name: str, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = to_text(part.get("type", NULL))
    texts = {field: named for field, named in _PART_TEXTS.get(kind, {}).items() if is_given(part, field)}
    empty = {**dict.fromkeys(texts, ""), **({"annotations": (), "logprobs": ()} if texts else {})}
    beside = {"logprobs": part.get("logprobs", ())} if kind == "output_text" else {}
    yield {"type": f"{name}.added", **where, "part": empty_fields(part, empty)}
    for field, named in texts.items():
        delta, done = _text_events(named, field, part[field], {**where, **beside})
        yield from delta
        for n, note in enumerate(to_objects(part.get("annotations", NULL))):
            yield {"type": f"{named}.annotation.added", **where, "annotation_index": n, "annotation": note}
        yield done
    yield {"type": f"{name}.done", **where, "part": part}


def _text_events(
    name: str, field: str, text: Raw, where: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the text in one delta, if it is not empty, and the event that ends it."""
    delta = [{"type": f"{name}.delta", **where, "delta": text}] if is_text(text) else []
    return delta, {"type": f"{name}.done", **where, field: text}


class ResponsesWriter(StreamWriter):
    """Writes a stream of items; its last event holds all of them."""

    def begin(self, content: CompletionContent) -> Events:
        self._begun = content
        self._output: list[dict[str, Any]] = []
        self._number = 0  # of the next event
        reply = make_response(content, (), status="in_progress", usage=None)
        yield self._render("response.created", response=reply)
        yield self._render("response.in_progress", response=reply)

    def open(self, part: OpenPart) -> Events:
        self._text = self._find_text(part)
        item = {**self._make_item(part, ""), "status": "in_progress"}
        kind = item["type"]
        empty = dict.fromkeys(_ITEM_PARTS.get(kind, ()), ()) | dict.fromkeys(_ITEM_TEXTS.get(kind, ()), "")
        given = {field: empty.get(field, value) for field, value in item.items()}
        yield self._render("response.output_item.added", output_index=part.place, item=given)
        if (frame := self._find_frame(part)) is not None:
            name, where, piece = frame
            yield self._render(f"{name}.added", **where, part=piece)

    def add(self, part: OpenPart, piece: str) -> Events:
        if part.call is not None and part.call.takes_text:
            return  # its text is inside the JSON that now arrives
        name, where, _ = self._text
        yield self._render(f"{name}.delta", **where, delta=piece)

    def close(self, part: OpenPart, whole: str) -> Events:
        item = self._make_item(part, whole)
        name, where, field = self._text
        if part.call is not None and part.call.takes_text:
            whole = part.call.input
            yield self._render(f"{name}.delta", **where, delta=whole)
        yield self._render(f"{name}.done", **where, **{field: whole})
        if (frame := self._find_frame(part, whole)) is not None:
            name, where, piece = frame
            yield self._render(f"{name}.done", **where, part=piece)
        self._output.append(item)
        yield self._render("response.output_item.done", output_index=part.place, item=item)

    def end(self, content: CompletionContent, completion: dict[str, Any]) -> Events:
        reply = {**make_response(content, self._output), **pick_token_fields(completion)}
        yield self._render(f"response.{reply['status']}", response=reply)

    def _render(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return render_event({"type": kind, **fields, "sequence_number": self._number - 1}, kind)

    def _make_item(self, part: OpenPart, whole: str) -> dict[str, Any]:
        if part.call is not None:
            return make_call_item(self._begun, part.place, part.call)
        make = make_text_item if part.kind == TEXT else make_thought_item
        return make(self._begun, part.place, whole)

    def _find_text(self, part: OpenPart) -> tuple[str, Place, str]:
        """Return the name of the events of a part's text, their place, and the field of the whole text."""
        item = self._make_item(part, "")
        where = {"item_id": item["id"], "output_index": part.place}
        if part.call is not None:
            [(field, name)] = _ITEM_TEXTS[item["type"]].items()
            return name, where, field
        if part.kind == TEXT:
            return "response.output_text", {**where, "content_index": 0, "logprobs": ()}, "text"
        return "response.reasoning_summary_text", {**where, "summary_index": 0}, "text"

    def _find_frame(self, part: OpenPart, whole: str = "") -> tuple[str, Place, dict[str, Any]] | None:
        """Return the name of the events around a text, their place, and the text's part of the item."""
        if part.call is not None:
            return None
        item = self._make_item(part, whole)
        [(field, (name, number))] = list(_ITEM_PARTS[item["type"]].items())[:1]
        return name, {"item_id": item["id"], "output_index": part.place, number: 0}, item[field][0]


def make_response(
    content: CompletionContent, output: Sequence[dict[str, Any]], **fields: Any
) -> dict[str, Any]:
    """Return a reply with some items."""
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(content.finish)
    return {
        "id": f"resp_{content.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if reason else "completed",
        "incomplete_details": {"reason": reason} if reason else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": content.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": content.prompt,
            "input_tokens_details": {"cached_tokens": content.cached},
            "output_tokens": content.sampled,
            "output_tokens_details": {"reasoning_tokens": content.reasoned},
            "total_tokens": content.prompt + content.sampled,
        },
        **fields,
    }


def make_thought_item(content: CompletionContent, place: int, text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{content.id}_{place}", "summary": summary}


def make_text_item(content: CompletionContent, place: int, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    own = {"id": f"msg_{content.id}_{place}", "role": "assistant", "status": "completed"}
    return {"type": "message", **own, "content": [part]}


def make_call_item(content: CompletionContent, place: int, call: CompletionCall) -> dict[str, Any]:
    ids = {"call_id": call.id, "name": call.name, "status": "completed"}
    if call.takes_text:
        return {"type": "custom_tool_call", "id": f"ctc_{content.id}_{place}", **ids, "input": call.input}
    own = {"id": f"fc_{content.id}_{place}", "arguments": call.arguments}
    return {"type": "function_call", **own, **ids}
