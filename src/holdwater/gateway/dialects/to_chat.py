"""Converts a request of any dialect to Chat Completions, for policies that support only that.

Messages are converted through the ledger's common messages. `from_chat.py` converts the replies back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...conversation.chat_message import to_chat_message
from ...ledger.dialects import find_dialect as spoken
from ...ledger.dialects import parse_messages
from ...ledger.message import CallPairing, CommonMessage, as_dict, as_list, as_string

Object = Mapping[str, Any]
INPUT_PARAMETER = "input"  # the only parameter of a text tool, if tools take objects


def convert_request(dialect: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the request in Chat Completions; parts without an equivalent are left out."""
    if dialect == "chat":
        return request
    speaks = spoken(dialect)
    pairing = CallPairing()
    said = [*speaks.system(request), *parse_messages(dialect, as_list(request.get(speaks.key)))]
    tools = as_list(request.get("tools"))
    others = {**request, "tools": [tool for tool in tools if not _is_custom(tool)]}
    made = {
        "model": request.get("model"),
        "messages": [
            _convert_message(pairing.pair_message(message)) for message in said if message.role != "unknown"
        ],
        "tools": [*speaks.tools(others), *(_convert_tool(tool) for tool in tools if _is_custom(tool))],
        **_OPTIONS[dialect](request),
    }
    return {key: value for key, value in made.items() if value is not None and value != []}


def custom_tools(request: Object) -> frozenset[str]:
    """Return the names of the tools that take a text instead of an object."""
    return frozenset(
        as_string(tool.get("name")) for tool in as_list(request.get("tools")) if _is_custom(tool)
    )


def _convert_message(message: CommonMessage) -> dict[str, Any]:
    made = to_chat_message(message)
    return {**made, "reasoning_content": message.reasoning} if message.reasoning else made


def _is_custom(tool: Any) -> bool:
    return as_dict(tool).get("type") == "custom" and "input_schema" not in tool


def _convert_tool(tool: Object) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {INPUT_PARAMETER: {"type": "string"}},
        "required": [INPUT_PARAMETER],
    }
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def _responses_options(request: Object) -> dict[str, Any]:
    format = as_dict(as_dict(request.get("text")).get("format"))
    choice = request.get("tool_choice")
    if isinstance(choice, dict):
        choice = _make_choice(choice.get("name"))
    return {
        **_pick_options(request, ("temperature", "top_p", "parallel_tool_calls", "stream", "user")),
        "max_tokens": request.get("max_output_tokens"),
        "reasoning_effort": as_dict(request.get("reasoning")).get("effort"),
        "response_format": _make_format(format, format) if format.get("type") == "json_schema" else None,
        "tool_choice": choice,
    }


def _messages_options(request: Object) -> dict[str, Any]:
    choice = as_dict(request.get("tool_choice"))
    kind = as_string(choice.get("type"))
    return {
        **_pick_options(request, ("temperature", "top_p", "top_k", "max_tokens", "stream")),
        "stop": request.get("stop_sequences"),
        "tool_choice": _make_choice(choice.get("name")) if kind == "tool" else _CHOICES.get(kind),
    }


def _gemini_options(request: Object) -> dict[str, Any]:
    config = as_dict(request.get("generationConfig", request.get("generation_config")))
    tools = as_dict(request.get("toolConfig", request.get("tool_config")))
    calling = as_dict(tools.get("functionCallingConfig", tools.get("function_calling_config")))
    schema = config.get("responseJsonSchema") or config.get("responseSchema")
    return {
        **{name: config.get(theirs) for theirs, name in _CONFIG.items()},
        "response_format": _make_format({"schema": schema}, {}) if schema else None,
        "tool_choice": _CHOICES.get(as_string(calling.get("mode")).lower()),
    }


_OPTIONS = {"responses": _responses_options, "messages": _messages_options, "gemini": _gemini_options}
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


def _pick_options(request: Object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: request.get(name) for name in names}


def _make_choice(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _make_format(format: Object, beside: Object) -> dict[str, Any]:
    given = {"name": as_string(beside.get("name")) or "reply", "schema": format.get("schema")}
    strict = {"strict": beside["strict"]} if "strict" in beside else {}
    return {"type": "json_schema", "json_schema": {**given, **strict}}
