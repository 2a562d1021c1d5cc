"""Streams of Anthropic Messages: reads their events, and renders a complete reply as events.

Usage accumulates along the stream, and pings come at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..conversion import CompletionContent, find_finish_reason, pick_token_fields, render_usage
from ..interface import read_counts
from ..message import SHAPE_ERRORS, as_dict, as_string
from ..sse import (
    NULL,
    ChunkStream,
    EventStream,
    Object,
    decode_object,
    decode_values,
    empty_fields,
    is_text,
    join_values,
    render_event,
    to_object,
    to_objects,
    to_text,
)
from ..stream_writer import TEXT, Events, OpenPart, StreamWriter


class _MessagesDetails(msgspec.Struct):
    thinking_tokens: int | None = None


class _MessagesUsage(msgspec.Struct):
    input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _MessagesDetails | None = None


def count_usage(counts: Any) -> ModelUsage:
    """Return the usage. Anthropic's `input_tokens` exclude cached tokens; in the record they include them."""
    usage = read_counts(counts, _MessagesUsage)
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
        return count_usage(self._usage)

    def _take(self, data: bytes) -> bool:
        self.take_event(decode_object(data))
        return True

    def take_event(self, event: dict[str, Any]) -> None:
        """Add an event to the reply."""
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


def render_events(reply: bytes) -> list[bytes]:
    """Return the events of each block; input counts come first, output counts with the stop reason."""
    whole = decode_values(reply)
    blocks = to_objects(whole.pop("content", NULL))
    error = whole.pop("error", NULL)
    usage = to_object(whole.pop("usage", NULL))
    last = {field: whole[field] for field in _MESSAGE_LAST if field in whole}
    beside = {field: whole[field] for field in _MESSAGE_BESIDE if field in whole}
    counts = {field: usage[field] for field in _NOTHING_SAID if field in usage}
    begun = {**whole, **dict.fromkeys((*last, *beside)), "content": ()}
    start = {**begun, "usage": empty_fields(usage, _NOTHING_SAID)}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for place, block in enumerate(blocks):
        events += _block_events(place, block)
    events.append({"type": "message_delta", "delta": last, "usage": counts, **beside})
    events.append({"type": "message_stop"} if error == NULL else {"type": "error", "error": error})
    return [render_event(data, data["type"]) for data in events]


_NOTHING_SAID = {"output_tokens": 0}
_MESSAGE_LAST = ("stop_reason", "stop_sequence", "stop_details", "container")  # known only at the end
_MESSAGE_BESIDE = ("context_management",)  # also known only at the end, but beside the delta
_BLOCK_TEXTS = {  # type of a block -> its fields that come in deltas, and the types of the deltas
    "text": {"text": "text_delta"},
    "thinking": {"thinking": "thinking_delta", "signature": "signature_delta"},
}


def _block_events(place: int, block: Object) -> Iterator[dict[str, Any]]:
    """Yield the events of a block; a block of unknown type comes whole."""
    kind = to_text(block.get("type", NULL))
    deltas: list[dict[str, Any]] = []
    empty: dict[str, Any] = {}
    for field, name in _BLOCK_TEXTS.get(kind, {}).items():
        if is_text(block.get(field, NULL)):
            empty[field] = ""
            deltas.append({"type": name, field: block[field]})
    if kind == "text" and (notes := to_objects(block.get("citations", NULL))):
        empty["citations"] = []
        deltas += ({"type": "citations_delta", "citation": note} for note in notes)
    if kind.endswith("tool_use") and "input" in block:  # client tools and server tools
        empty["input"] = {}
        deltas.append({"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()})
    yield {"type": "content_block_start", "index": place, "content_block": {**block, **empty}}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": place, "delta": delta}
    yield {"type": "content_block_stop", "index": place}


class MessagesChunks(ChunkStream, MessagesStream):
    """Returns the events of a stream as chunks of Chat Completions."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[int, int] = {}  # block -> number of its call

    def take_event(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "message_start":
                message = as_dict(event.get("message"))
                names = {name: as_string(message.get(name)) for name in ("id", "model")}
                self._about = {**self._about, **names, "created": int(time.time())}
                self._emit_delta({"role": "assistant", "content": ""})
            case "content_block_start":
                self._begin_block(event["index"], as_dict(event.get("content_block")))
            case "content_block_delta":
                self._add_block_delta(event["index"], as_dict(event.get("delta")))
            case "message_delta":
                reason = as_string(as_dict(event.get("delta")).get("stop_reason"))
                if reason:
                    self._emit_delta({}, find_finish_reason(reason, calls=bool(self._calls)))
            case "message_stop":
                self._emit_usage(render_usage(self.usage))
        super().take_event(event)

    def _begin_block(self, place: int, block: dict[str, Any]) -> None:
        if block.get("type") == "tool_use":
            number = self._calls[place] = len(self._calls)
            function = {"name": as_string(block.get("name")), "arguments": ""}
            call = {"index": number, "id": block.get("id"), "type": "function", "function": function}
            self._emit_delta({"tool_calls": [call]})
        elif text := as_string(block.get("text")):
            self._emit_delta({"content": text})

    def _add_block_delta(self, place: int, delta: dict[str, Any]) -> None:
        if thought := as_string(delta.get("thinking")):
            self._emit_delta({"reasoning_content": thought})
        elif text := as_string(delta.get("text")):
            self._emit_delta({"content": text})
        elif place in self._calls and (piece := as_string(delta.get("partial_json"))):
            call = {"index": self._calls[place], "function": {"arguments": piece}}
            self._emit_delta({"tool_calls": [call]})


class MessagesWriter(StreamWriter):
    """Writes a stream of blocks; the counts come with its end."""

    def begin(self, content: CompletionContent) -> Events:
        message = {**make_message(content), "content": (), "stop_reason": None}
        counts = {"input_tokens": 0, "output_tokens": 0}
        yield _render({"type": "message_start", "message": {**message, "usage": counts}})

    def open(self, part: OpenPart) -> Events:
        if part.call is not None:
            block = {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}
        elif part.kind == TEXT:
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        yield _render({"type": "content_block_start", "index": part.place, "content_block": block})

    def add(self, part: OpenPart, piece: str) -> Events:
        if part.call is not None:
            delta = {"type": "input_json_delta", "partial_json": piece}
        elif part.kind == TEXT:
            delta = {"type": "text_delta", "text": piece}
        else:
            delta = {"type": "thinking_delta", "thinking": piece}
        yield _render({"type": "content_block_delta", "index": part.place, "delta": delta})

    def close(self, part: OpenPart, whole: str) -> Events:
        yield _render({"type": "content_block_stop", "index": part.place})

    def end(self, content: CompletionContent, completion: dict[str, Any]) -> Events:
        last = {"stop_reason": find_stop_reason(content), "stop_sequence": None}
        counts = {"usage": make_usage(content), **pick_token_fields(completion)}
        yield _render({"type": "message_delta", "delta": last, **counts})
        yield _render({"type": "message_stop"})


def _render(event: dict[str, Any]) -> bytes:
    return render_event(event, event["type"])


def make_message(content: CompletionContent) -> dict[str, Any]:
    """Return the fields of a reply that are known at its start."""
    return {
        "id": f"msg_{content.id}",
        "type": "message",
        "role": "assistant",
        "model": content.model,
        "stop_sequence": None,
    }


def find_stop_reason(content: CompletionContent) -> str:
    stop = {"length": "max_tokens", "content_filter": "refusal"}.get(content.finish)
    return stop or ("tool_use" if content.calls else "end_turn")


def make_usage(content: CompletionContent) -> dict[str, Any]:
    reasoned = {"output_tokens_details": {"thinking_tokens": content.reasoned}} if content.reasoned else {}
    return {
        "input_tokens": content.prompt - content.cached,
        "cache_read_input_tokens": content.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": content.sampled,
        **reasoned,
    }
