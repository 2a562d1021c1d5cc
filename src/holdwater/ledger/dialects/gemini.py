"""Parses Gemini generateContent into common messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import (
    CommonMessage,
    MessageMedia,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    parse_arguments,
    render_unknown,
    to_media,
    to_part,
)
from .chat import parse_tokens
from .dialect_form import ROLES, DialectForm, ModelReply, make_function_tool


def _parse_message(item: dict[str, Any]) -> Iterator[CommonMessage]:
    parts = _list_parts(item)
    answered = [part for part in parts if _get_either(part, "functionResponse")]
    for part in answered:
        answer = as_dict(_get_either(part, "functionResponse"))
        yield CommonMessage(
            role="tool",
            parts=tuple(_parse_answer(answer)),
            answers=as_string(answer.get("id")),
            tool=as_string(answer.get("name")),
        )
    rest = [part for part in parts if not _get_either(part, "functionResponse")]
    if rest or not answered:
        yield _make_message(ROLES.get(as_string(item.get("role")) or "user", "unknown"), rest)


def _parse_answer(answer: dict[str, Any]) -> Iterator[str | MessageMedia]:
    """Yield a response with a single text as that text, any other response as JSON; then its media."""
    response = answer.get("response")
    values = list(as_dict(response).values())
    yield to_part(values[0] if len(values) == 1 and isinstance(values[0], str) else response)
    for part in map(as_dict, as_list(answer.get("parts"))):
        yield _parse_part(part)


def _make_message(role: str, parts: list[dict[str, Any]]) -> CommonMessage:
    thoughts = [as_string(part.get("text")) for part in parts if part.get("thought") is True]
    calls = [as_dict(call) for part in parts if (call := _get_either(part, "functionCall"))]
    shown = [
        part for part in parts if part.get("thought") is not True and not _get_either(part, "functionCall")
    ]
    shown = [part for part in shown if set(part) - {"thoughtSignature", "thought_signature"}]
    return CommonMessage(
        role=role,
        parts=tuple(_parse_part(part) for part in shown if part.get("text") != ""),
        reasoning="".join(thoughts),
        calls=tuple(
            ToolCall(
                id=as_string(call.get("id")),
                name=as_string(call.get("name")),
                arguments=parse_arguments(call.get("args")),
            )
            for call in calls
        ),
    )


def _parse_part(part: dict[str, Any]) -> str | MessageMedia:
    inline, file = as_dict(_get_either(part, "inlineData")), as_dict(_get_either(part, "fileData"))
    if inline:
        return to_media(inline.get("data"), as_string(_get_either(inline, "mimeType")), bare=True)
    if file:
        return to_media(_get_either(file, "fileUri"), as_string(_get_either(file, "mimeType")))
    return to_part(part["text"]) if "text" in part else render_unknown(part)


def _get_either(part: dict[str, Any], name: str) -> Any:
    """Return a field by its camelCase or snake_case name: the provider accepts both."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return part.get(name, part.get(snake))


def _parse_system(head: dict[str, Any]) -> Iterator[CommonMessage]:
    system = as_dict(_get_either(head, "systemInstruction"))
    for message in _parse_message(system) if system else ():
        yield CommonMessage(role="system", parts=message.parts)


def _parse_reply(reply: dict[str, Any]) -> ModelReply:
    candidates = [as_dict(candidate) for candidate in as_list(reply.get("candidates"))]
    contents = [content for candidate in candidates if (content := as_dict(candidate.get("content")))]
    spoken = [_make_message("assistant", _list_parts(content)) for content in contents]
    blocked = as_string(as_dict(reply.get("promptFeedback")).get("blockReason"))
    return ModelReply(
        message=spoken[0] if spoken else None,
        others=tuple(spoken[1:]),
        finish=blocked or (as_string(candidates[0].get("finishReason")) if candidates else ""),
        model=as_string(reply.get("modelVersion")),
        tokens=parse_tokens(reply, reply),
    )


def _list_parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [as_dict(part) or {"text": part} for part in as_list(content.get("parts"))]


def _parse_tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(as_dict, as_list(head.get("tools"))):
        for declared in map(as_dict, as_list(_get_either(tool, "functionDeclarations"))):
            parameters = _get_either(declared, "parametersJsonSchema") or declared.get("parameters")
            yield make_function_tool(as_string(declared.get("name")), declared.get("description"), parameters)


GEMINI = DialectForm("contents", _parse_message, _parse_system, _parse_reply, _parse_tools)
