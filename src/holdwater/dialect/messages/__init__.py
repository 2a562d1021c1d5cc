"""Anthropic Messages: content in blocks. `stream.py` has its streams.

Clients move `cache_control` along the conversation: a message is the same with and without it. It needs a
block as its parent, so clients turn a text into a text block while the hint is on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Raw

from ...core.records import ModelUsage
from ..conversion import (
    TOOL_CHOICES,
    CompletionContent,
    ReplyContext,
    make_response_format,
    make_tool_choice,
    pick_options,
)
from ..interface import (
    AdaptedRequest,
    Dialect,
    PathMatch,
    ProviderVariables,
    know_headers,
)
from ..message import (
    DECODE_ERRORS,
    ROLES,
    CommonMessage,
    MessageMedia,
    ModelReply,
    ToolCall,
    as_dict,
    as_list,
    as_string,
    make_function_tool,
    parse_call,
    render_unknown,
    to_media,
    to_part,
)
from ..reply_tokens import parse_tokens
from ..untranslated_fields import MESSAGES_KNOWN, MESSAGES_RULES
from .request_rendering import THINKING_BLOCKS, render_request
from .stream import (
    MessagesChunks,
    MessagesStream,
    MessagesWriter,
    count_usage,
    find_stop_reason,
    make_message,
    make_usage,
    render_events,
)

_PATH = re.compile(r"(?:/v1)*/messages(/count_tokens)?")
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})
_EPOCH = "1970-01-01T00:00:00Z"
_CACHE_CONTROL = b'"cache_control"'
# One level deep and short: a longer value is content, even under this key.
_VALUE = re.compile(rb'\s{0,9}:\s{0,9}(?:null|\{(?:[^{}"]{0,9}"[^"\\]{0,32}"){0,8}[^{}"]{0,9}\})')
_COMMA = re.compile(rb"\s{0,9},\s{0,9}")
_TEXT_FIRST = re.compile(rb'"content"\s{0,9}:\s{0,9}\[\s{0,9}\{\s{0,9}"t')
_OPENING = 64  # bytes of a message within which its content begins, if it has few other keys
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class MessagesDialect(Dialect):
    name = "messages"
    path = "v1/messages"
    provider = ProviderVariables(
        "https://api.anthropic.com",
        "ANTHROPIC_BASE_URL",
        ("ANTHROPIC_API_KEY",),
        bearer="ANTHROPIC_AUTH_TOKEN",
    )
    known_headers = know_headers(
        {"anthropic-version", "anthropic-beta", "anthropic-dangerous-direct-browser-access", "x-app"},
        "x-claude-",
    )
    key_header = "x-api-key"
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'
    system_keys = ("system",)
    reply_key = "stop_reason"
    known_keys = MESSAGES_KNOWN
    untranslated = MESSAGES_RULES

    def match_path(self, path: str) -> PathMatch | None:
        match = _PATH.fullmatch(path)
        return match and PathMatch(self.path + (match[1] or ""), counts=bool(match[1]))

    def recognizes(self, path: str, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers

    def strip_transient(self, message: bytes) -> bytes:
        return strip_transient(message)

    def error_body(self, status: int, message: str, code: str | None = None) -> bytes:
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def count_usage(self, counts: Any) -> ModelUsage:
        return count_usage(counts)

    def stream(self, asked: AdaptedRequest) -> MessagesStream:
        return MessagesStream()

    def render_stream(self, reply: bytes) -> list[bytes]:
        return render_events(reply)

    def render_model(self, model: str) -> dict[str, Any]:
        return {"type": "model", "id": model, "display_name": model, "created_at": _EPOCH}

    def render_models(self, models: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [model["id"] for model in models] or [None]
        return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}

    def parse_message(self, item: dict[str, Any]) -> Iterator[CommonMessage]:
        blocks = _list_blocks(item.get("content"))
        rest = []
        for block in blocks:
            if not _get_kind(block).endswith("tool_result"):
                rest.append(block)
                continue
            yield CommonMessage(
                role="tool",
                parts=tuple(map(_parse_block, _list_blocks(block.get("content")))),
                answers=as_string(block.get("tool_use_id")),
                failed=block.get("is_error") is True,
            )
        if rest or not blocks:
            yield _make_message(ROLES.get(as_string(item.get("role")), "unknown"), rest)

    def parse_system(self, head: dict[str, Any]) -> Iterator[CommonMessage]:
        if head.get("system"):
            yield CommonMessage(role="system", parts=tuple(map(_parse_block, _list_blocks(head["system"]))))

    def parse_tools(self, head: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for tool in map(as_dict, as_list(head.get("tools"))):
            yield make_function_tool(
                as_string(tool.get("name")), tool.get("description"), tool.get("input_schema")
            )

    def parse_reply(self, reply: dict[str, Any]) -> ModelReply:
        blocks = _list_blocks(reply.get("content"))
        return ModelReply(
            message=_make_message("assistant", blocks)
            if blocks or as_string(reply.get("type")) == "message"
            else None,
            finish=as_string(reply.get("stop_reason")),
            model=as_string(reply.get("model")),
            tokens=parse_tokens(reply, reply),
        )

    def split_choices(self, reply: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        yield {"role": "assistant", "content": reply.get("content")}, reply

    def convert_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        choice = as_dict(request.get("tool_choice"))
        kind = as_string(choice.get("type"))
        output = as_dict(request.get("output_config"))
        schema = as_dict(output.get("format")).get("schema")
        return {
            **pick_options(request, "temperature", "top_p", "top_k", "max_tokens", "stream"),
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
            "reasoning_effort": output.get("effort"),
            "response_format": make_response_format(schema, {}) if schema else None,
            "stop": request.get("stop_sequences"),
            "tool_choice": make_tool_choice(choice.get("name")) if kind == "tool" else TOOL_CHOICES.get(kind),
        }

    def render_completion(self, content: CompletionContent) -> dict[str, Any]:
        return {
            **make_message(content),
            "content": list(_render_blocks(content)),
            "stop_reason": find_stop_reason(content),
            "usage": make_usage(content),
        }

    def append_text(self, reply: dict[str, Any], text: str) -> None:
        blocks = reply["content"]
        calls = (
            place for place, block in enumerate(blocks) if _get_kind(as_dict(block)).endswith("tool_use")
        )
        blocks.insert(next(calls, len(blocks)), {"type": "text", "text": text})

    def write_stream(self, context: ReplyContext) -> MessagesWriter:
        return MessagesWriter(context)

    translates = True
    own_headers = MappingProxyType({"anthropic-version": "2023-06-01"})
    thought_fields = hidden_thoughts = (THINKING_BLOCKS,)

    def request_from_chat(self, request: dict[str, Any], messages: list[CommonMessage]) -> dict[str, Any]:
        return render_request(request, messages)

    def reply_to_chat(self, body: bytes) -> dict[str, Any]:
        completion = super().reply_to_chat(body)
        blocks = _list_blocks(msgspec.json.decode(body).get("content"))
        if thoughts := [block for block in blocks if _get_kind(block) in _THOUGHTS]:
            completion["choices"][0]["message"][THINKING_BLOCKS] = thoughts
        return completion

    def open_chunks(self) -> MessagesChunks:
        return MessagesChunks()


def strip_transient(message: bytes) -> bytes:
    """Return the stable form of `message`: without cache hints, and a single text block as a text."""
    message = _strip_hints(message)
    if _TEXT_FIRST.search(message, 0, _OPENING) is None:
        return message
    try:
        content = msgspec.json.decode(message, type=_MessagesContent).content
        [block] = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except (*DECODE_ERRORS, ValueError):
        return message
    if block.keys() != {"type", "text"} or bytes(block["type"]) != b'"text"':
        return message
    return message.replace(bytes(content), bytes(block["text"]), 1)


def _strip_hints(message: bytes) -> bytes:
    """Return the bytes of `message` without cache hints; the inputs of tools are left as they are."""
    if _CACHE_CONTROL not in message:
        return message
    parts: list[bytes] = []
    done = 0
    for given in _find_inputs(message):
        at = message.index(given, done)
        parts += (strip_cache_control(message[done:at]), given)
        done = at + len(given)
    return b"".join((*parts, strip_cache_control(message[done:])))


def _find_inputs(message: bytes) -> list[bytes]:
    """Return the inputs of the tool calls in `message` that contain `cache_control`."""
    if b'"input"' not in message:
        return []
    try:
        content = msgspec.json.decode(message, type=_MessagesContent).content
        blocks = msgspec.json.decode(content, type=list[dict[str, Raw]])
    except DECODE_ERRORS:
        return []
    inputs = [bytes(block["input"]) for block in blocks if "input" in block]
    return [given for given in inputs if _CACHE_CONTROL in given]


def strip_cache_control(message: bytes) -> bytes:
    """Return the bytes of `message` without anything that looks like a cache hint."""
    parts: list[bytes] = []
    done = at = 0
    while (at := message.find(_CACHE_CONTROL, at)) >= 0:
        value = _VALUE.match(message, at + len(_CACHE_CONTROL))
        if value is None:
            at += len(_CACHE_CONTROL)
            continue
        before = message[done:at].rstrip()
        comma = before.endswith(b",")
        parts.append(before[:-1].rstrip() if comma else message[done:at])
        after = None if comma else _COMMA.match(message, value.end())
        done = at = after.end() if after else value.end()
    return b"".join((*parts, message[done:])) if done else message


class _MessagesContent(msgspec.Struct):
    content: Raw


def _list_blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [as_dict(block) or {"type": "text", "text": block} for block in content]
    return [] if content is None else [{"type": "text", "text": content}]


def _make_message(role: str, blocks: list[dict[str, Any]]) -> CommonMessage:
    parts: list[str | MessageMedia] = []
    calls: list[ToolCall] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = _get_kind(block)
        if kind.endswith("tool_use"):
            calls.append(parse_call(block, "input"))
        elif kind not in _THOUGHTS:
            parts.append(_parse_block(block))
        elif thought := as_string(block.get("thinking")):
            thoughts.append(thought)
    return CommonMessage(role=role, parts=tuple(parts), reasoning="\n\n".join(thoughts), calls=tuple(calls))


def _get_kind(block: dict[str, Any]) -> str:
    return as_string(block.get("type"))


def _parse_block(block: dict[str, Any]) -> str | MessageMedia:
    if block.get("type") == "text":
        return to_part(block.get("text"))
    source = as_dict(block.get("source"))
    if "data" in source:
        text = as_string(source.get("type")) == "text"
        type_ = as_string(source.get("media_type"))
        return to_part(source["data"]) if text else to_media(source["data"], type_, bare=True)
    if "url" in source or "file_id" in source:
        return to_media(source.get("url") or source.get("file_id"), _get_kind(block))
    return render_unknown(block)


def _render_blocks(content: CompletionContent) -> Iterator[dict[str, Any]]:
    if content.thoughts:
        yield {"type": "thinking", "thinking": content.thoughts, "signature": ""}
    if content.text or not content.calls:
        yield {"type": "text", "text": content.text}
    for call in content.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": call.object}
