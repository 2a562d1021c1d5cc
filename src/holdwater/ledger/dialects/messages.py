"""Parses Anthropic Messages into common messages."""

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


def _list_blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [as_dict(block) or {"type": "text", "text": block} for block in content]
    return [] if content is None else [{"type": "text", "text": content}]


def _parse_message(item: dict[str, Any]) -> Iterator[CommonMessage]:
    blocks = _list_blocks(item.get("content"))
    results = [block for block in blocks if _get_kind(block).endswith("tool_result")]
    for block in results:
        yield CommonMessage(
            role="tool",
            parts=tuple(_parse_blocks(_list_blocks(block.get("content")))),
            answers=as_string(block.get("tool_use_id")),
            failed=block.get("is_error") is True,
        )
    rest = [block for block in blocks if not _get_kind(block).endswith("tool_result")]
    if rest or not results:
        yield _make_message(ROLES.get(as_string(item.get("role")), "unknown"), rest)


def _make_message(role: str, blocks: list[dict[str, Any]]) -> CommonMessage:
    thoughts = [as_string(block.get("thinking")) for block in blocks if _get_kind(block) == "thinking"]
    return CommonMessage(
        role=role,
        parts=tuple(_parse_blocks(block for block in blocks if not _is_aside(block))),
        reasoning="\n\n".join(thought for thought in thoughts if thought),
        calls=tuple(
            ToolCall(
                id=as_string(block.get("id")),
                name=as_string(block.get("name")),
                arguments=parse_arguments(block.get("input")),
            )
            for block in blocks
            if _get_kind(block).endswith("tool_use")
        ),
    )


def _get_kind(block: dict[str, Any]) -> str:
    return as_string(block.get("type"))


def _is_aside(block: dict[str, Any]) -> bool:
    return _get_kind(block).endswith("tool_use") or _get_kind(block) in ("thinking", "redacted_thinking")


def _parse_blocks(blocks: Any) -> Iterator[str | MessageMedia]:
    for block in blocks:
        source = as_dict(block.get("source"))
        if _get_kind(block) == "text":
            yield to_part(block.get("text"))
        elif source and "data" in source:
            text = as_string(source.get("type")) == "text"
            type_ = as_string(source.get("media_type"))
            yield to_part(source["data"]) if text else to_media(source["data"], type_, bare=True)
        elif source and ("url" in source or "file_id" in source):
            yield to_media(source.get("url") or source.get("file_id"), _get_kind(block))
        else:
            yield render_unknown(block)


def _parse_system(head: dict[str, Any]) -> Iterator[CommonMessage]:
    if head.get("system"):
        yield CommonMessage(role="system", parts=tuple(_parse_blocks(_list_blocks(head["system"]))))


def _parse_reply(reply: dict[str, Any]) -> ModelReply:
    blocks = _list_blocks(reply.get("content"))
    return ModelReply(
        message=_make_message("assistant", blocks)
        if blocks or as_string(reply.get("type")) == "message"
        else None,
        finish=as_string(reply.get("stop_reason")),
        model=as_string(reply.get("model")),
        tokens=parse_tokens(reply, reply),
    )


def _parse_tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(as_dict, as_list(head.get("tools"))):
        yield make_function_tool(
            as_string(tool.get("name")), tool.get("description"), tool.get("input_schema")
        )


MESSAGES = DialectForm("messages", _parse_message, _parse_system, _parse_reply, _parse_tools)
