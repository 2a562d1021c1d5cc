"""OpenAI Responses, as common messages: each item is one of its own until they are merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import Message, ToolCall, arguments, compact, fields, items, merged, said, string
from .chat import content, tokens
from .form import ROLES, Dialect, Reply, function


def _messages(item: dict[str, Any]) -> Iterator[Message]:
    kind = string(item.get("type")) or "message"
    if kind == "message":
        role = ROLES.get(string(item.get("role")), "unknown")
        yield Message(role=role, parts=tuple(content(item.get("content"))))
    elif kind == "reasoning":
        thoughts = [*items(item.get("summary")), *items(item.get("content"))]
        texts = [text for thought in thoughts if (text := string(fields(thought).get("text")))]
        yield Message(role="assistant", reasoning="\n\n".join(texts))
    elif kind.endswith("_call"):
        yield Message(role="assistant", calls=(_call(kind, item),))
    elif kind.endswith("_output"):
        answers = string(item.get("call_id")) or string(item.get("id"))
        yield Message(role="tool", parts=tuple(content(item.get("output"))), answers=answers)
    else:
        yield Message(role="unknown", parts=(compact(item),))


def _call(kind: str, item: dict[str, Any]) -> ToolCall:
    given = item.get("arguments", item.get("input", item.get("action")))
    return ToolCall(
        id=string(item.get("call_id")) or string(item.get("id")),
        name=string(item.get("name")) or kind.removesuffix("_call"),
        arguments=given if kind == "custom_tool_call" else arguments(given),
    )


def _system(head: dict[str, Any]) -> Iterator[Message]:
    if head.get("instructions"):
        yield Message(role="system", parts=tuple(content(head["instructions"])))
    if isinstance(head.get("input"), str):  # a text in place of a list of messages
        yield Message(role="user", parts=(said(head["input"]),))


def _reply(reply: dict[str, Any]) -> Reply:
    output = [m for item in map(fields, items(reply.get("output"))) for m in _messages(item)]
    spoken = list(merged(message for message in output if message.role == "assistant"))
    finish = string(fields(reply.get("incomplete_details")).get("reason")) or string(reply.get("status"))
    first = spoken[0] if spoken else None
    return Reply(
        message=first,
        others=tuple(spoken[1:]),
        finish=finish,
        model=string(reply.get("model")),
        tokens=tokens(reply, reply),
    )


def _tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(fields, items(head.get("tools"))):
        name = string(tool.get("name")) or string(tool.get("type"))
        yield function(name, tool.get("description"), tool.get("parameters"))


RESPONSES = Dialect("input", _messages, _system, _reply, _tools)
