"""Converts between common messages and Chat Completions: the shared part of each dialect's conversion.

Policies and trainers support Chat Completions alone. A dialect converts its requests to it and renders a
completion as a reply of its own; see `Dialect.request_to_chat` and `Dialect.reply_from_chat`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from ..core.records import ModelUsage
from .message import (
    DECODE_ERRORS,
    CallPairing,
    CommonMessage,
    MessageMedia,
    ModelReply,
    as_dict,
    as_list,
    as_string,
)
from .untranslated_fields import is_hosted

Object = dict[str, Any]
INPUT_PARAMETER = "input"  # the only parameter of a text tool, if tools take objects
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
JSON_OBJECT = {"type": "json_object"}  # the response format of any JSON
_CHOICE_FIELDS = ("token_ids", "logprobs", "meta_info", "prompt_token_ids")  # fields of the choice
_COMPLETION_FIELDS = ("prompt_token_ids", "policy_version")  # fields of the completion


def convert_messages(messages: Iterable[CommonMessage]) -> list[Object]:
    """Return messages in the Chat Completions format, with their reasoning."""
    pairing = CallPairing()
    converted: list[Object] = []
    for message in messages:
        if message.role != "unknown":
            made = to_chat_message(pairing.pair_message(message))
            converted.append({**made, "reasoning_content": message.reasoning} if message.reasoning else made)
    return converted


def to_chat_message(message: CommonMessage) -> Object:
    """Return a message in the Chat Completions format, which has no reasoning."""
    texts = [part for part in message.parts if isinstance(part, str)]
    content: Any = "\n".join(texts)
    if len(texts) < len(message.parts):
        content = [_render_part(part) for part in message.parts]
    made: Object = {"role": message.role, "content": content or None if message.calls else content}
    if message.calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _encode_text(call.arguments)},
            }
            for call in message.calls
        ]
    if message.role == "tool":
        made["tool_call_id"] = message.answers
    return made


def _render_part(part: str | MessageMedia) -> Object:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind, _, format = part.type.partition("/")
    where = f"data:{part.type};base64,{part.data}" if part.data else part.url
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": where}}
    if kind == "audio" and part.data:
        return {"type": "input_audio", "input_audio": {"data": part.data, "format": format}}
    return {"type": "file", "file": {"file_data" if part.data else "file_id": where}}


def _encode_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode({} if value is None else value).decode()


def convert_tools(request: Mapping[str, Any], parse: Callable[[Object], Iterator[Object]]) -> list[Object]:
    """Return the tools of a request; a tool that takes a text takes an object with this text.

    Tools that the provider runs itself, such as a web search, are left out: no other server has them.
    """
    tools = as_list(request.get("tools"))
    texts = [tool for tool in tools if _is_text_tool(tool)]
    others = {**request, "tools": [t for t in tools if not (_is_text_tool(t) or is_hosted(t))]}
    return [*parse(others), *map(_convert_text_tool, texts)]


def list_text_tools(tools: Any) -> frozenset[str]:
    """Return the names of the tools that take a text instead of an object."""
    return frozenset(as_string(tool.get("name")) for tool in as_list(tools) if _is_text_tool(tool))


def _is_text_tool(tool: Any) -> bool:
    return as_dict(tool).get("type") == "custom" and "input_schema" not in tool


def _convert_text_tool(tool: Object) -> Object:
    parameters = {
        "type": "object",
        "properties": {INPUT_PARAMETER: {"type": "string"}},
        "required": [INPUT_PARAMETER],
    }
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def pick_options(request: Mapping[str, Any], *names: str) -> Object:
    """Return the options that have the same name in Chat Completions."""
    return {name: request.get(name) for name in names}


def make_tool_choice(name: Any) -> Object:
    """Return the choice of one function."""
    return {"type": "function", "function": {"name": name}}


def make_response_format(schema: Any, beside: Mapping[str, Any]) -> Object:
    """Return the response format of a JSON schema; `beside` may have its name and `strict`."""
    given = {"name": as_string(beside.get("name")) or "reply", "schema": schema}
    strict = {"strict": beside["strict"]} if "strict" in beside else {}
    return {"type": "json_schema", "json_schema": {**given, **strict}}


_FINISHES = {"max_tokens": "length", "max_output_tokens": "length", "length": "length"}
_FILTERS = frozenset({"refusal", "content_filter", "safety", "prohibited_content", "recitation", "blocklist"})


def find_finish_reason(finish: str, *, calls: bool) -> str:
    """Return the finish reason of a completion for that of any dialect."""
    if finish.lower() in _FILTERS:
        return "content_filter"
    return _FINISHES.get(finish.lower()) or ("tool_calls" if calls else "stop")


def make_completion(reply: ModelReply, usage: ModelUsage) -> Object:
    """Return a reply of any dialect as a `chat.completion`."""
    said = reply.message or CommonMessage(role="assistant")
    [message] = convert_messages([said])
    finish = find_finish_reason(reply.finish, calls=bool(said.calls))
    return {
        "object": "chat.completion",
        "model": reply.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": render_usage(usage),
    }


def render_usage(usage: ModelUsage) -> Object:
    """Return the usage of a completion."""
    return {
        "prompt_tokens": usage.input_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens": usage.output_tokens,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


class ReplyContext(NamedTuple):
    """The parts of a request that its reply depends on."""

    model: str = ""
    text_tools: frozenset[str] = frozenset()  # the tools that take a text instead of an object


class CompletionContent:
    """The content of a completion that all dialects can express."""

    def __init__(self, completion: Object, context: ReplyContext) -> None:
        choice = _first_choice(completion)
        message = as_dict(choice.get("message"))
        self.id = secrets.token_hex(12)
        self.model = as_string(completion.get("model")) or context.model
        self.text = _join_text(message.get("content")) or as_string(message.get("refusal"))
        self.thoughts = as_string(message.get("reasoning_content")) or as_string(message.get("reasoning"))
        self.calls = [
            parse_call(as_dict(call), context.text_tools) for call in as_list(message.get("tool_calls"))
        ]
        self.finish = as_string(choice.get("finish_reason"))
        usage = as_dict(completion.get("usage"))
        self.prompt = _count_tokens(usage.get("prompt_tokens"), completion.get("prompt_token_ids"))
        self.sampled = _count_tokens(usage.get("completion_tokens"), choice.get("token_ids"))
        self.cached = _count_tokens(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens"), None)
        spent = as_dict(usage.get("completion_tokens_details"))
        self.reasoned = _count_tokens(spent.get("reasoning_tokens"), None)


class CompletionCall(NamedTuple):
    """A tool call of a completion."""

    id: str
    name: str
    arguments: str
    custom: bool  # the completion has it as the call of a text tool
    takes_text: bool

    @property
    def object(self) -> Object:
        """The arguments as an object; invalid JSON becomes the only field of one."""
        try:
            return msgspec.json.decode(self.arguments or "{}", type=dict[str, Any])
        except DECODE_ERRORS:
            return {"arguments": self.arguments}

    @property
    def input(self) -> str:
        """The text for a tool that takes a text."""
        given = self.object.get(INPUT_PARAMETER)
        return given if isinstance(given, str) and not self.custom else self.arguments


def pick_token_fields(completion: Object) -> Object:
    """Return the token ids, log probabilities and policy version of a completion."""
    choice = _first_choice(completion)
    beside = {name: choice[name] for name in _CHOICE_FIELDS if choice.get(name) is not None}
    beyond = {name: completion[name] for name in _COMPLETION_FIELDS if completion.get(name) is not None}
    return {**beside, **beyond}


def _first_choice(completion: Object) -> Object:
    return as_dict(next(iter(as_list(completion.get("choices"))), None))


def parse_call(call: Object, text_tools: frozenset[str]) -> CompletionCall:
    custom = as_dict(call.get("custom"))
    called = custom or as_dict(call.get("function"))
    name = as_string(called.get("name"))
    return CompletionCall(
        id=as_string(call.get("id")) or f"call_{secrets.token_hex(12)}",
        name=name,
        arguments=_encode_text(called.get("input" if custom else "arguments")),
        custom=bool(custom),
        takes_text=bool(custom) or name in text_tools,
    )


def _join_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(as_string(as_dict(part).get("text")) for part in content)
    return as_string(content)


def _count_tokens(count: Any, ids: Any) -> int:
    """Return the reported count, or else the number of ids."""
    return count if isinstance(count, int) else len(as_list(ids))
