"""Gemini generateContent, as common messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import Media, Message, ToolCall, arguments, compact, fields, items, medium, said, string
from .chat import tokens
from .form import ROLES, Dialect, Reply, function


def _messages(item: dict[str, Any]) -> Iterator[Message]:
    parts = _parts(item)
    answered = [part for part in parts if _either(part, "functionResponse")]
    for part in answered:
        answer = fields(_either(part, "functionResponse"))
        yield Message(
            role="tool",
            parts=tuple(_answer(answer)),
            answers=string(answer.get("id")),
            tool=string(answer.get("name")),
        )
    rest = [part for part in parts if not _either(part, "functionResponse")]
    if rest or not answered:
        yield _spoken(ROLES.get(string(item.get("role")) or "user", "unknown"), rest)


def _answer(answer: dict[str, Any]) -> Iterator[str | Media]:
    """The one text of a response as it is, anything else as JSON; media stand beside it."""
    response = answer.get("response")
    values = list(fields(response).values())
    yield said(values[0] if len(values) == 1 and isinstance(values[0], str) else response)
    for part in map(fields, items(answer.get("parts"))):
        yield _part(part)


def _spoken(role: str, parts: list[dict[str, Any]]) -> Message:
    thoughts = [string(part.get("text")) for part in parts if part.get("thought") is True]
    calls = [fields(call) for part in parts if (call := _either(part, "functionCall"))]
    shown = [part for part in parts if part.get("thought") is not True and not _either(part, "functionCall")]
    shown = [part for part in shown if set(part) - {"thoughtSignature", "thought_signature"}]
    return Message(
        role=role,
        parts=tuple(_part(part) for part in shown if part.get("text") != ""),
        reasoning="".join(thoughts),
        calls=tuple(
            ToolCall(
                id=string(call.get("id")),
                name=string(call.get("name")),
                arguments=arguments(call.get("args")),
            )
            for call in calls
        ),
    )


def _part(part: dict[str, Any]) -> str | Media:
    inline, file = fields(_either(part, "inlineData")), fields(_either(part, "fileData"))
    if inline:
        return medium(inline.get("data"), string(_either(inline, "mimeType")), bare=True)
    if file:
        return medium(_either(file, "fileUri"), string(_either(file, "mimeType")))
    return said(part["text"]) if "text" in part else compact(part)


def _either(part: dict[str, Any], name: str) -> Any:
    """A field by its name in JSON or in Python: both are accepted by the provider."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return part.get(name, part.get(snake))


def _system(head: dict[str, Any]) -> Iterator[Message]:
    system = fields(_either(head, "systemInstruction"))
    for message in _messages(system) if system else ():
        yield Message(role="system", parts=message.parts)


def _reply(reply: dict[str, Any]) -> Reply:
    candidates = [fields(candidate) for candidate in items(reply.get("candidates"))]
    contents = [content for candidate in candidates if (content := fields(candidate.get("content")))]
    spoken = [_spoken("assistant", _parts(content)) for content in contents]
    blocked = string(fields(reply.get("promptFeedback")).get("blockReason"))
    return Reply(
        message=spoken[0] if spoken else None,
        others=tuple(spoken[1:]),
        finish=blocked or (string(candidates[0].get("finishReason")) if candidates else ""),
        model=string(reply.get("modelVersion")),
        tokens=tokens(reply, reply),
    )


def _parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [fields(part) or {"text": part} for part in items(content.get("parts"))]


def _tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(fields, items(head.get("tools"))):
        for declared in map(fields, items(_either(tool, "functionDeclarations"))):
            parameters = _either(declared, "parametersJsonSchema") or declared.get("parameters")
            yield function(string(declared.get("name")), declared.get("description"), parameters)


GEMINI = Dialect("contents", _messages, _system, _reply, _tools)
