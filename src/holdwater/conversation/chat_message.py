"""Renders a common message in the Chat Completions format. `ledger/dialects/` parses common messages."""

from __future__ import annotations

from typing import Any

import msgspec

from ..ledger.message import CommonMessage, MessageMedia, ToolCall


def to_chat_message(message: CommonMessage) -> dict[str, Any]:
    """Return a message in the Chat Completions format, which has no reasoning."""
    content: Any = [_render_part(part) for part in message.parts]
    if all(isinstance(part, str) for part in message.parts):
        content = "\n".join(str(part) for part in message.parts)
    made: dict[str, Any] = {"role": message.role, "content": content or None if message.calls else content}
    if message.calls:
        made["tool_calls"] = [_render_call(call) for call in message.calls]
    if message.role == "tool":
        made["tool_call_id"] = message.answers
    return made


def _render_part(part: str | MessageMedia) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, _, format = part.type.partition("/")
    where = f"data:{part.type};base64,{part.data}" if part.data else part.url
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": where}}
    if kind == "audio" and part.data:
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": format}}
    return {"type": "file", "file": {"file_data" if part.data else "file_id": where}}


def _render_call(call: ToolCall) -> dict[str, Any]:
    given = call.arguments
    text = given if isinstance(given, str) else msgspec.json.encode({} if given is None else given).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
