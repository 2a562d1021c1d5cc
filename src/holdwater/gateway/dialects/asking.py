"""A request of any dialect as one of Chat Completions: for whoever answers and speaks nothing else.

Messages go by way of the common ones that the ledger reads. The way back, for replies, is in `replying.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ledger.chat_message import chat_message
from ...ledger.dialects import dialect as spoken
from ...ledger.dialects import messages
from ...ledger.message import Message, Pairing, fields, items, string

Object = Mapping[str, Any]
INPUT = "input"  # the one parameter of a tool that takes a text, where tools take objects


def as_chat(dialect: str, request: dict[str, Any]) -> dict[str, Any]:
    """The same request in Chat Completions; what has no word there is left out."""
    if dialect == "chat":
        return request
    speaks = spoken(dialect)
    pairing = Pairing()
    said = [*speaks.system(request), *messages(dialect, items(request.get(speaks.key)))]
    tools = items(request.get("tools"))
    others = {**request, "tools": [tool for tool in tools if not _is_custom(tool)]}
    made = {
        "model": request.get("model"),
        "messages": [_message(pairing.named(message)) for message in said if message.role != "unknown"],
        "tools": [*speaks.tools(others), *(_tool(tool) for tool in tools if _is_custom(tool))],
        **_OPTIONS[dialect](request),
    }
    return {key: value for key, value in made.items() if value is not None and value != []}


def custom_tools(request: Object) -> frozenset[str]:
    """The names of its tools that take a text in the place of an object."""
    return frozenset(string(tool.get("name")) for tool in items(request.get("tools")) if _is_custom(tool))


def _message(message: Message) -> dict[str, Any]:
    made = chat_message(message)
    return {**made, "reasoning_content": message.reasoning} if message.reasoning else made


def _is_custom(tool: Any) -> bool:
    return fields(tool).get("type") == "custom" and "input_schema" not in tool


def _tool(tool: Object) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _responses(request: Object) -> dict[str, Any]:
    format = fields(fields(request.get("text")).get("format"))
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        choice = _named(choice.get("name"))
    return {
        **_given(request, ("temperature", "top_p", "parallel_tool_calls", "stream", "user")),
        "max_tokens": request.get("max_output_tokens"),
        "reasoning_effort": fields(request.get("reasoning")).get("effort"),
        "response_format": _schema(format, format) if format.get("type") == "json_schema" else None,
        "tool_choice": choice,
    }


def _messages(request: Object) -> dict[str, Any]:
    choice = fields(request.get("tool_choice"))
    kind = string(choice.get("type"))
    return {
        **_given(request, ("temperature", "top_p", "top_k", "max_tokens", "stream")),
        "stop": request.get("stop_sequences"),
        "tool_choice": _named(choice.get("name")) if kind == "tool" else _CHOICES.get(kind),
    }


def _gemini(request: Object) -> dict[str, Any]:
    config = fields(request.get("generationConfig", request.get("generation_config")))
    tools = fields(request.get("toolConfig", request.get("tool_config")))
    calling = fields(tools.get("functionCallingConfig", tools.get("function_calling_config")))
    schema = config.get("responseJsonSchema") or config.get("responseSchema")
    return {
        **{name: config.get(theirs) for theirs, name in _CONFIG.items()},
        "response_format": _schema({"schema": schema}, {}) if schema else None,
        "tool_choice": _CHOICES.get(string(calling.get("mode")).lower()),
    }


_OPTIONS = {"responses": _responses, "messages": _messages, "gemini": _gemini}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CONFIG = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "candidateCount": "n",
}


def _given(request: Object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: request.get(name) for name in names}


def _named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _schema(format: Object, beside: Object) -> dict[str, Any]:
    given = {"name": string(beside.get("name")) or "reply", "schema": format.get("schema")}
    strict = {"strict": beside["strict"]} if "strict" in beside else {}
    return {"type": "json_schema", "json_schema": {**given, **strict}}
