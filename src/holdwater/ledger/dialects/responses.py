"""Parses OpenAI Responses into common messages: one per item, until `merge_messages` joins them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import (
    CommonMessage,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    merge_messages,
    parse_arguments,
    render_unknown,
    to_part,
)
from .chat import parse_content, parse_tokens
from .dialect_form import ROLES, DialectForm, ModelReply, make_function_tool


def _parse_item(item: dict[str, Any]) -> Iterator[CommonMessage]:
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


def _parse_call(kind: str, item: dict[str, Any]) -> ToolCall:
    given = item.get("arguments", item.get("input", item.get("action")))
    return ToolCall(
        id=as_string(item.get("call_id")) or as_string(item.get("id")),
        name=as_string(item.get("name")) or kind.removesuffix("_call"),
        arguments=given if kind == "custom_tool_call" else parse_arguments(given),
    )


def _parse_system(head: dict[str, Any]) -> Iterator[CommonMessage]:
    if head.get("instructions"):
        yield CommonMessage(role="system", parts=tuple(parse_content(head["instructions"])))
    if isinstance(head.get("input"), str):  # a string instead of a list of messages
        yield CommonMessage(role="user", parts=(to_part(head["input"]),))


def _parse_reply(reply: dict[str, Any]) -> ModelReply:
    output = [m for item in map(as_dict, as_list(reply.get("output"))) for m in _parse_item(item)]
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


def _parse_tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(as_dict, as_list(head.get("tools"))):
        name = as_string(tool.get("name")) or as_string(tool.get("type"))
        yield make_function_tool(name, tool.get("description"), tool.get("parameters"))


RESPONSES = DialectForm("input", _parse_item, _parse_system, _parse_reply, _parse_tools)
