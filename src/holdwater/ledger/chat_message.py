"""A common message in the form of Chat Completions. The way there is in `dialects/`."""

from __future__ import annotations

from typing import Any

import msgspec

from .message import Media, Message, ToolCall


def chat_message(message: Message) -> dict[str, Any]:
    """A message as Chat Completions has it; thoughts are not part of that."""
    content: Any = [_part(part) for part in message.parts]
    if all(isinstance(part, str) for part in message.parts):
        content = "\n".join(str(part) for part in message.parts)
    made: dict[str, Any] = {"role": message.role, "content": content or None if message.calls else content}
    if message.calls:
        made["tool_calls"] = [_call(call) for call in message.calls]
    if message.role == "tool":
        made["tool_call_id"] = message.answers
    return made


def _part(part: str | Media) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, _, format = part.type.partition("/")
    where = f"data:{part.type};base64,{part.data}" if part.data else part.url
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": where}}
    if kind == "audio" and part.data:
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": format}}
    return {"type": "file", "file": {"file_data" if part.data else "file_id": where}}


def _call(call: ToolCall) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else msgspec.json.encode({} if given is None else given).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
