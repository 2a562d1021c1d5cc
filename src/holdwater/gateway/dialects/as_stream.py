"""Renders a complete reply as a stream: for each dialect, the server-sent events with the same content.

Each text comes in one piece, between the events that the provider itself puts around it. Values are copied
as bytes, so that unknown fields survive. The dialects' own modules read streams.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from .sse import render_event

Object = dict[str, Raw]

_NULL = Raw(b"null")
_OBJECT = msgspec.json.Decoder(Object | None)
_OBJECTS = msgspec.json.Decoder(list[Object] | None)
_STRING = msgspec.json.Decoder(str | None)


def render_chat(reply: bytes) -> list[bytes]:
    """Return the chunks of the choices' content, then of their ends, then the usage."""
    whole = _decode_reply(reply)
    choices = list(enumerate(_objects(whole.pop("choices", _NULL))))
    last = [{"choices": [], field: whole.pop(field)} for field in _CHAT_LAST if _is_given(whole, field)]
    said = [{"choices": [delta]} for place, choice in choices for delta in _chat_deltas(place, choice)]
    ends = [{"choices": [_chat_end(place, choice)]} for place, choice in choices]
    parts: list[dict[str, Any]] = [*said, *ends, *last] or [{"choices": ()}]
    kind = {"object": "chat.completion.chunk"}
    again = {field: value for field, value in whole.items() if bytes(value)[:1] not in (b"[", b"{")}
    chunks = [{**(again if n else whole), **kind, **part} for n, part in enumerate(parts)]
    return [*map(render_event, chunks), b"data: [DONE]\n\n"]


_CHAT_LAST = ("usage", "error")


def _chat_deltas(place: int, choice: Object) -> list[dict[str, Any]]:
    """Return the deltas of a choice; token ids and other fields beside the message come with the last one."""
    *before, last = _message_deltas(_object(choice.get("message", _NULL)))
    apart = ("index", "message", "finish_reason")
    beside = {field: value for field, value in choice.items() if field not in apart}
    where = {"index": choice.get("index", place), "finish_reason": None}
    return [*({**where, "delta": delta} for delta in before), {**beside, **where, "delta": last}]


def _chat_end(place: int, choice: Object) -> dict[str, Any]:
    end = choice.get("finish_reason", _NULL)
    return {"index": choice.get("index", place), "delta": {}, "finish_reason": end}


def _message_deltas(message: Object) -> Iterator[dict[str, Any]]:
    """Yield the deltas of a message: reasoning and other fields before the content, tool calls after it."""
    role, calls = message.pop("role", "assistant"), _objects(message.get("tool_calls", _NULL))
    if calls:
        del message["tool_calls"]
    texts = {field: value for field, value in message.items() if _is_text(value)}
    content = {"content": texts.pop("content")} if "content" in texts else {}
    others = {field: value for field, value in message.items() if field not in texts}
    yield {"role": role, **others, **dict.fromkeys(content, "")}
    yield from ({field: text} for field, text in texts.items())
    if content:
        yield content
    for place, call in enumerate(calls):
        yield from ({"tool_calls": [{**piece, "index": place}]} for piece in _call_pieces(call))


def _call_pieces(call: Object) -> Iterator[dict[str, Any]]:
    function = _object(call.get("function", _NULL))
    if _is_text(function.get("arguments", _NULL)):
        yield {**call, "function": {**function, "arguments": ""}}
        yield {"function": {"arguments": function["arguments"]}}
    else:
        yield call


def render_completions(reply: bytes) -> list[bytes]:
    """Return one chunk per choice, then the usage: a chunk has the form of a reply."""
    whole = _decode_reply(reply)
    parts: list[dict[str, Any]] = [{"choices": [choice]} for choice in _objects(whole.pop("choices", _NULL))]
    parts += [{"choices": [], field: whole.pop(field)} for field in _CHAT_LAST if _is_given(whole, field)]
    return [*(render_event({**whole, **part}) for part in parts), b"data: [DONE]\n\n"]


def render_responses(reply: bytes) -> list[bytes]:
    """Return the events of each item with its parts, and at the end the reply itself."""
    whole = _decode_reply(reply)
    status = _STRING.decode(whole.get("status", _NULL))
    end = status if status in ("incomplete", "failed") else "completed"
    begun = _empty_fields(whole, _RESPONSE_BEGUN)
    told: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for place, item in enumerate(_objects(whole.get("output", _NULL))):
        told += _item_events(place, item)
    told.append({"type": f"response.{end}", "response": whole})
    return [render_event({**data, "sequence_number": n}, data["type"]) for n, data in enumerate(told)]


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
    kind = _type(item)
    where = {"item_id": item.get("id", ""), "output_index": place}
    parts = {field: names for field, names in _ITEM_PARTS.get(kind, {}).items() if _is_given(item, field)}
    texts = {field: name for field, name in _ITEM_TEXTS.get(kind, {}).items() if _is_given(item, field)}
    empty = {"status": "in_progress", **dict.fromkeys(parts, ()), **dict.fromkeys(texts, "")}
    yield {"type": "response.output_item.added", "output_index": place, "item": _empty_fields(item, empty)}
    for field, (name, number) in parts.items():
        for n, part in enumerate(_objects(item[field])):
            yield from _part_events(part, name, {**where, number: n})
    for field, name in texts.items():
        delta, done = _text_events(name, field, item[field], where)
        yield from delta
        yield {**done, **({"name": item["name"]} if kind == "function_call" and "name" in item else {})}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _part_events(part: Object, name: str, where: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = _type(part)
    texts = {field: named for field, named in _PART_TEXTS.get(kind, {}).items() if _is_given(part, field)}
    empty = {**dict.fromkeys(texts, ""), **({"annotations": (), "logprobs": ()} if texts else {})}
    beside = {"logprobs": part.get("logprobs", ())} if kind == "output_text" else {}
    yield {"type": f"{name}.added", **where, "part": _empty_fields(part, empty)}
    for field, named in texts.items():
        delta, done = _text_events(named, field, part[field], {**where, **beside})
        yield from delta
        for n, note in enumerate(_objects(part.get("annotations", _NULL))):
            yield {"type": f"{named}.annotation.added", **where, "annotation_index": n, "annotation": note}
        yield done
    yield {"type": f"{name}.done", **where, "part": part}


def _text_events(
    name: str, field: str, text: Raw, where: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the text in one delta, if it is not empty, and the event that ends it."""
    delta = [{"type": f"{name}.delta", **where, "delta": text}] if _is_text(text) else []
    return delta, {"type": f"{name}.done", **where, field: text}


def render_messages(reply: bytes) -> list[bytes]:
    """Return the events of each block; input counts come first, output counts with the stop reason."""
    whole = _decode_reply(reply)
    blocks = _objects(whole.pop("content", _NULL))
    error = whole.pop("error", _NULL)
    usage = _object(whole.pop("usage", _NULL))
    last = {field: whole[field] for field in _MESSAGE_LAST if field in whole}
    beside = {field: whole[field] for field in _MESSAGE_BESIDE if field in whole}
    counts = {field: usage[field] for field in _NOTHING_SAID if field in usage}
    begun = {**whole, **dict.fromkeys((*last, *beside)), "content": ()}
    start = {**begun, "usage": _empty_fields(usage, _NOTHING_SAID)}
    told: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for place, block in enumerate(blocks):
        told += _block_events(place, block)
    told.append({"type": "message_delta", "delta": last, "usage": counts, **beside})
    told.append({"type": "message_stop"} if error == _NULL else {"type": "error", "error": error})
    return [render_event(data, data["type"]) for data in told]


_NOTHING_SAID = {"output_tokens": 0}
_MESSAGE_LAST = ("stop_reason", "stop_sequence", "stop_details", "container")  # known only at the end
_MESSAGE_BESIDE = ("context_management",)  # also known only at the end, but beside the delta
_BLOCK_TEXTS = {  # type of a block -> its fields that come in deltas, and the types of the deltas
    "text": {"text": "text_delta"},
    "thinking": {"thinking": "thinking_delta", "signature": "signature_delta"},
}


def _block_events(place: int, block: Object) -> Iterator[dict[str, Any]]:
    """Yield the events of a block; a block of unknown type comes whole."""
    deltas: list[dict[str, Any]] = []
    empty: dict[str, Any] = {}
    for field, name in _BLOCK_TEXTS.get(_type(block), {}).items():
        if _is_text(block.get(field, _NULL)):
            empty[field] = ""
            deltas.append({"type": name, field: block[field]})
    if _type(block) == "text" and (notes := _objects(block.get("citations", _NULL))):
        empty["citations"] = []
        deltas += ({"type": "citations_delta", "citation": note} for note in notes)
    if _type(block).endswith("tool_use") and "input" in block:  # client tools and server tools
        empty["input"] = {}
        deltas.append({"type": "input_json_delta", "partial_json": bytes(block["input"]).decode()})
    yield {"type": "content_block_start", "index": place, "content_block": {**block, **empty}}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": place, "delta": delta}
    yield {"type": "content_block_stop", "index": place}


def render_gemini(reply: bytes) -> list[bytes]:
    """Return a single chunk: a chunk has the form of a reply."""
    return [render_event(_decode_reply(reply))]


def _decode_reply(reply: bytes) -> Object:
    """Decode a reply without blanks between its values: the data of an event are one line."""
    return msgspec.json.decode(msgspec.json.format(reply, indent=-1), type=Object)


def _object(value: Raw) -> Object:
    return _OBJECT.decode(value) or {}


def _objects(values: Raw) -> list[Object]:
    return _OBJECTS.decode(values) or []


def _type(value: Object) -> str:
    return _STRING.decode(value.get("type", _NULL)) or ""


def _empty_fields(value: Object, empty: Mapping[str, Any]) -> dict[str, Any]:
    """Return `value` as it is before any content, with the fields of `empty` that it has emptied."""
    return {**value, **{field: nothing for field, nothing in empty.items() if field in value}}


def _is_given(value: Object, field: str) -> bool:
    return value.get(field, _NULL) != _NULL


def _is_text(value: Raw) -> bool:
    """Whether the value is a non-empty text."""
    return bytes(value)[:1] == b'"' and len(value) > 2
