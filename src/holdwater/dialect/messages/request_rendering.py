"""Renders requests of Chat Completions as requests of Anthropic Messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import CommonMessage, MessageMedia, as_dict, as_list, as_string

THINKING_BLOCKS = "thinking_blocks"  # of a message in Chat Completions: the server's own, signed
DEFAULT_TOKENS = 16384  # of a reply, if the request has no limit: this dialect requires one
_CHOICES = {"auto": "auto", "required": "any", "none": "none"}
_EFFORTS = frozenset({"low", "medium", "high"})
Object = dict[str, Any]


def render_request(request: Object, messages: list[CommonMessage]) -> Object:
    """Return a request with these messages; keys that are None are absent."""
    prompts = [message.text for message in messages if message.role == "system"]
    tools = [_render_tool(as_dict(tool)) for tool in as_list(request.get("tools"))]
    stop = request.get("stop")
    made = {
        "model": request.get("model"),
        "max_tokens": request.get("max_completion_tokens") or request.get("max_tokens") or DEFAULT_TOKENS,
        "system": "\n\n".join(prompts) or None,
        "messages": list(_render_messages(messages, _list_thoughts(request))),
        "tools": tools or None,
        "tool_choice": _render_choice(request) if tools else None,
        "stop_sequences": [stop] if isinstance(stop, str) else stop,
        "stream": request.get("stream"),
        "output_config": _render_output(request),
        **{name: request.get(name) for name in ("temperature", "top_p", "top_k")},
    }
    return {key: value for key, value in made.items() if value is not None}


def _list_thoughts(request: Object) -> list[list[Object]]:
    """Return the thoughts that belong to each message."""
    return [as_list(as_dict(message).get(THINKING_BLOCKS)) for message in as_list(request.get("messages"))]


def _render_messages(messages: list[CommonMessage], thoughts: list[list[Object]]) -> Iterator[Object]:
    """Yield messages of users and assistants in turn: neighbours of one role become one message."""
    role, blocks = "", list[Object]()
    for message, thought in zip(messages, thoughts, strict=True):
        if message.role in ("system", "unknown"):
            continue
        speaker = "assistant" if message.role == "assistant" else "user"
        if speaker != role and blocks:
            yield {"role": role, "content": blocks}
            blocks = []
        role = speaker
        blocks += [*thought, *_render_message(message)]
    if blocks:
        yield {"role": role, "content": blocks}


def _render_message(message: CommonMessage) -> Iterator[Object]:
    parts = [_render_part(part) for part in message.parts if part != ""]
    if message.role == "tool":
        failed = {"is_error": True} if message.failed else {}
        yield {"type": "tool_result", "tool_use_id": message.answers, "content": parts, **failed}
        return
    yield from parts
    for call in message.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.named_arguments}


def _render_part(part: str | MessageMedia) -> Object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = "image" if part.type.startswith("image") else "document"
    if part.data:
        return {"type": kind, "source": {"type": "base64", "media_type": part.type, "data": part.data}}
    return {"type": kind, "source": {"type": "url", "url": part.url}}


def _render_tool(tool: Object) -> Object:
    function = as_dict(tool.get("function"))
    schema = as_dict(function.get("parameters")) or {"type": "object", "properties": {}}
    described = {"description": text} if (text := as_string(function.get("description"))) else {}
    return {"name": as_string(function.get("name")), **described, "input_schema": schema}


def _render_choice(request: Object) -> Object | None:
    given = request.get("tool_choice")
    serial = {"disable_parallel_tool_use": True} if request.get("parallel_tool_calls") is False else {}
    if name := as_string(as_dict(as_dict(given).get("function")).get("name")):
        return {"type": "tool", "name": name, **serial}
    kind = _CHOICES.get(as_string(given), "auto" if serial else "")
    return {"type": kind, **(serial if kind != "none" else {})} if kind else None


def _render_output(request: Object) -> Object | None:
    schema = as_dict(as_dict(request.get("response_format")).get("json_schema")).get("schema")
    effort = as_string(request.get("reasoning_effort"))
    made = {
        **({"format": {"type": "json_schema", "schema": schema}} if schema else {}),
        **({"effort": effort} if effort in _EFFORTS else {}),
    }
    return made or None
