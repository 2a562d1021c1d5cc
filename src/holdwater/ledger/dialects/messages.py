"""Anthropic Messages, as common messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..message import Media, Message, ToolCall, arguments, compact, fields, items, medium, said, string
from .chat import tokens
from .form import ROLES, Dialect, Reply, function


def _blocks(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [fields(block) or {"type": "text", "text": block} for block in content]
    return [] if content is None else [{"type": "text", "text": content}]


def _messages(item: dict[str, Any]) -> Iterator[Message]:
    blocks = _blocks(item.get("content"))
    results = [block for block in blocks if _kind(block).endswith("tool_result")]
    for block in results:
        yield Message(
            role="tool",
            parts=tuple(_block_parts(_blocks(block.get("content")))),
            answers=string(block.get("tool_use_id")),
            failed=block.get("is_error") is True,
        )
    rest = [block for block in blocks if not _kind(block).endswith("tool_result")]
    if rest or not results:
        yield _spoken(ROLES.get(string(item.get("role")), "unknown"), rest)


def _spoken(role: str, blocks: list[dict[str, Any]]) -> Message:
    thoughts = [string(block.get("thinking")) for block in blocks if _kind(block) == "thinking"]
    return Message(
        role=role,
        parts=tuple(_block_parts(block for block in blocks if not _aside(block))),
        reasoning="\n\n".join(thought for thought in thoughts if thought),
        calls=tuple(
            ToolCall(
                id=string(block.get("id")),
                name=string(block.get("name")),
                arguments=arguments(block.get("input")),
            )
            for block in blocks
            if _kind(block).endswith("tool_use")
        ),
    )


def _kind(block: dict[str, Any]) -> str:
    return string(block.get("type"))


def _aside(block: dict[str, Any]) -> bool:
    return _kind(block).endswith("tool_use") or _kind(block) in ("thinking", "redacted_thinking")


def _block_parts(blocks: Any) -> Iterator[str | Media]:
    for block in blocks:
        source = fields(block.get("source"))
        if _kind(block) == "text":
            yield said(block.get("text"))
        elif source and "data" in source:
            text = string(source.get("type")) == "text"
            type_ = string(source.get("media_type"))
            yield said(source["data"]) if text else medium(source["data"], type_, bare=True)
        elif source and ("url" in source or "file_id" in source):
            yield medium(source.get("url") or source.get("file_id"), _kind(block))
        else:
            yield compact(block)


def _system(head: dict[str, Any]) -> Iterator[Message]:
    if head.get("system"):
        yield Message(role="system", parts=tuple(_block_parts(_blocks(head["system"]))))


def _reply(reply: dict[str, Any]) -> Reply:
    blocks = _blocks(reply.get("content"))
    return Reply(
        message=_spoken("assistant", blocks) if blocks or string(reply.get("type")) == "message" else None,
        finish=string(reply.get("stop_reason")),
        model=string(reply.get("model")),
        tokens=tokens(reply, reply),
    )


def _tools(head: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(fields, items(head.get("tools"))):
        yield function(string(tool.get("name")), tool.get("description"), tool.get("input_schema"))


MESSAGES = Dialect("messages", _messages, _system, _reply, _tools)
