"""OpenAI Responses: items in, items out. `stream.py` has its streams.

`input` is a list of items or a text. A request may name the reply or the conversation that it continues. An
item is one common message, until `merge_messages` joins them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..conversion import (
    JSON_OBJECT,
    CompletionContent,
    ReplyContext,
    make_response_format,
    make_tool_choice,
    pick_options,
)
from ..interface import AdaptedRequest, ChainName, ChainRules
from ..message import (
    DECODE_ERRORS,
    ROLES,
    CommonMessage,
    ModelReply,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    make_function_tool,
    merge_messages,
    parse_arguments,
    render_unknown,
    to_part,
)
from ..openai import OpenAIDialect, parse_content
from ..reply_tokens import parse_tokens
from ..sse import NULL
from ..untranslated_fields import RESPONSES_KNOWN, RESPONSES_RULES
from .stream import (
    ResponsesReply,
    ResponsesStream,
    ResponsesWriter,
    count_usage,
    make_call_item,
    make_response,
    make_text_item,
    make_thought_item,
    render_events,
)

LONGEST_REFERENCE = 512  # bytes
_REFERENCE = frozenset({"id", "type"})  # the keys of an `item_reference`
# Lines that Codex puts above the output of a command.
_GENERATED = re.compile(rb"(?:Chunk ID: [0-9a-f]+|Wall time: [0-9.]+ seconds?)\\n")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])


def read_chain_name(head: Mapping[str, Raw]) -> ChainName | None:
    """Return the name of the reply, or else of the conversation, that a request continues."""
    for key, stays in (("previous_response_id", False), ("conversation", True)):
        value = msgspec.json.decode(head.get(key, NULL))
        name = value.get("id") if isinstance(value, dict) else value
        if isinstance(name, str) and name:
            return ChainName(name, stays)
    return None


def read_reply_name(reply: bytes) -> str:
    """Return the id of a reply."""
    name = msgspec.json.decode(reply, type=ResponsesReply).id
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


class ResponsesDialect(OpenAIDialect):
    name = path = "responses"
    key = "input"
    optional = True
    merges_items = True
    system_keys = ("instructions", "input")
    reply_key = "output"
    known_keys = RESPONSES_KNOWN
    untranslated = RESPONSES_RULES
    chaining = ChainRules(
        read_chain_name,
        read_reply_name,
        read_output_items,
        read_item_name,
        read_reference_name,
        key="previous_response_id",
        reference_mark=b"item_reference",
    )

    def strip_generated(self, message: bytes) -> bytes:
        """Return an item without its id, which a client may have generated, and without a command's duration.

        A reference to an earlier item keeps its id, which is its only content.
        """
        if b'"id"' in message:
            try:
                fields = _OBJECT.decode(message)
            except DECODE_ERRORS:
                return message
            if fields.keys() <= _REFERENCE:
                return message
            fields.pop("id", None)
            message = msgspec.json.encode(fields)
        return _GENERATED.sub(b"", message) if b'"function_call_output"' in message else message

    def name_parameter(self, head: Mapping[str, Raw], key: str) -> str:
        return "max_output_tokens" if key == "max_tokens" else key

    def count_usage(self, counts: Any) -> ModelUsage:
        return count_usage(counts)

    def stream(self, asked: AdaptedRequest) -> ResponsesStream:
        return ResponsesStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return render_events(reply)

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        kind = as_string(item.get("type")) or "message"
        if kind == "message":
            role = ROLES.get(as_string(item.get("role")), "unknown")
            yield CommonMessage(role=role, parts=tuple(parse_content(item.get("content"))))
        elif kind == "reasoning":
            thoughts = [*as_list(item.get("summary")), *as_list(item.get("content"))]
            texts = [text for thought in thoughts if (text := as_string(as_dict(thought).get("text")))]
            yield CommonMessage(role="assistant", reasoning="\n\n".join(texts))
        elif kind.endswith("_call"):
            yield CommonMessage(role="assistant", calls=(_parse_call(kind, item),))
        elif kind.endswith("_output"):
            answers = as_string(item.get("call_id")) or as_string(item.get("id"))
            yield CommonMessage(role="tool", parts=tuple(parse_content(item.get("output"))), answers=answers)
        else:
            yield CommonMessage(role="unknown", parts=(render_unknown(item),))

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        if head.get("instructions"):
            yield CommonMessage(role="system", parts=tuple(parse_content(head["instructions"])))
        if isinstance(head.get("input"), str):  # a string instead of a list of messages
            yield CommonMessage(role="user", parts=(to_part(head["input"]),))

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in map(as_dict, as_list(head.get("tools"))):
            name = as_string(tool.get("name")) or as_string(tool.get("type"))
            yield make_function_tool(name, tool.get("description"), tool.get("parameters"))

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        output = [m for item in map(as_dict, as_list(reply.get("output"))) for m in self.parse_message(item)]
        spoken = list(merge_messages(message for message in output if message.role == "assistant"))
        finish = as_string(as_dict(reply.get("incomplete_details")).get("reason")) or as_string(
            reply.get("status")
        )
        first = spoken[0] if spoken else None
        return ModelReply(
            message=first,
            others=tuple(spoken[1:]),
            finish=finish,
            model=as_string(reply.get("model")),
            tokens=parse_tokens(reply, reply),
        )

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        yield reply.get("output"), reply

    def convert_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        format = as_dict(as_dict(request.get("text")).get("format"))
        kind = format.get("type")
        choice = request.get("tool_choice")
        if isinstance(choice, dict):
            choice = make_tool_choice(choice.get("name"))
        return {
            **pick_options(request, "temperature", "top_p", "parallel_tool_calls", "stream", "user"),
            "max_tokens": request.get("max_output_tokens"),
            "reasoning_effort": as_dict(request.get("reasoning")).get("effort"),
            "response_format": make_response_format(format.get("schema"), format)
            if kind == "json_schema"
            else JSON_OBJECT
            if kind == "json_object"
            else None,
            "tool_choice": choice,
        }

    def render_completion(self, content: CompletionContent) -> dict[str, Any]:
        return make_response(content, list(_render_items(content)))

    def write_stream(self, context: ReplyContext) -> ResponsesWriter:
        return ResponsesWriter(context)

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        part = {"type": "output_text", "text": text, "annotations": []}
        said = {
            "type": "message",
            "id": f"msg_{reply.get('id')}_added",
            "role": "assistant",
            "content": [part],
        }
        reply["output"].append({**said, "status": "completed"})


class _ResponsesOutput(msgspec.Struct):
    output: list[Raw]


class _ResponsesItem(msgspec.Struct):
    id: Any = None


def _parse_call(kind: str, item: dict[str, Any]) -> ToolCall:
    given = item.get("arguments", item.get("input", item.get("action")))
    return ToolCall(
        id=as_string(item.get("call_id")) or as_string(item.get("id")),
        name=as_string(item.get("name")) or kind.removesuffix("_call"),
        arguments=given if kind == "custom_tool_call" else parse_arguments(given),
    )


def _render_items(content: CompletionContent) -> Iterator[dict[str, Any]]:
    if content.thoughts:
        yield make_thought_item(content, 0, content.thoughts)
    if content.text or not content.calls:
        yield make_text_item(content, 0, content.text)
    for place, call in enumerate(content.calls):
        yield make_call_item(content, place, call)
